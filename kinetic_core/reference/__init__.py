"""Plain NumPy truth for every operation, and the smallest working plugin of each kind.

`ops` computes one operation for one row, `backend` interprets a program with it, `head`, `drafter` and `cache` are the
heads, drafters and caches that do nothing clever, `tiny_hybrid` is a miniature architecture whose model lives in
memory, and `random_model` makes a random model from an architecture's description of its tiny variants. Everything
fast in the project is compared with what is here, so nothing here is meant to be fast.
"""
