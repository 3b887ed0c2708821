"""The suite of architectures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kinetic_core.conformance import agreement, answers, endings, lowerings, prediction, recorded, rows, states
from kinetic_core.conformance.formats import FORMATS
from kinetic_core.conformance.models import ModelFamily, TinyModel
from kinetic_core.conformance.on_models import OnModels, registered_backend
from kinetic_core.conformance.suite import Conformance, clause
from kinetic_core.interfaces import KernelBackend


class ArchitectureConformance(OnModels, Conformance, kind="architecture"):
    """Proves an architecture exact on random models of every variant that its `tiny()` declares::

        class TestToy(ArchitectureConformance):
            target = Toy
            name = "toy"

    backend: name or class of what the models run on. formats: the tensor formats they are stored in.
    """

    backend: ClassVar[str | type[KernelBackend]] = "cpu"
    formats: ClassVar[Sequence[str]] = FORMATS

    @classmethod
    def make_family(cls) -> ModelFamily:
        """Every variant of the target, on the backend."""
        return ModelFamily(cls.target, cls.name, registered_backend(cls.backend), cls.formats)

    @clause("ARCH-01", "A prompt in one batch gives every row the bits that tokens run one by one give.")
    def batch(self, model: TinyModel) -> None:
        """See the statement."""
        rows.batch_equals_one_by_one(model)

    @clause("ARCH-02", "However a prompt is split into steps, every row and the states have the same bits.")
    def split(self, model: TinyModel) -> None:
        """See the statement."""
        rows.any_split(model)

    @clause("ARCH-03", "Other sequences in the same step change no bit.")
    def neighbours(self, model: TinyModel) -> None:
        """See the statement."""
        rows.neighbours(model)

    @clause("ARCH-04", "Which blocks and slot a sequence has, and what lay in them before, changes no bit.")
    def anywhere(self, model: TinyModel) -> None:
        """See the statement."""
        rows.anywhere(model)

    @clause("ARCH-05", "A row of a draft tree has the bits of its path run alone.")
    def draft_rows(self, model: TinyModel) -> None:
        """See the statement."""
        rows.draft_row_equals_its_path(model)

    @clause("ARCH-06", "Drafts that are not committed leave no trace: states, blocks and later rows are as without.")
    def no_trace(self, model: TinyModel) -> None:
        """See the statement."""
        rows.drafts_leave_no_trace(model)

    @clause("ARCH-07", "Committing drafts leaves the bits that plain decoding leaves.")
    def commit(self, model: TinyModel) -> None:
        """See the statement."""
        rows.commit_equals_plain(model)

    @clause("ARCH-08", "Going back to a copy of slot and block continues with the same bits.")
    def restore_in_memory(self, model: TinyModel) -> None:
        """See the statement."""
        states.restore_in_memory(model)

    @clause("ARCH-09", "A state written to a file continues in this and in another executable with the same bits.")
    def restore_from_a_file(self, model: TinyModel) -> None:
        """See the statement."""
        states.restore_from_a_file(model)

    @clause("ARCH-10", "A state copied after a named row of a batch is the state of exactly that row.")
    def named_row(self, model: TinyModel) -> None:
        """See the statement."""
        states.state_after_a_named_row(model)

    @clause(
        "ARCH-11", "A sequence cut back, without recurrent states to any length, with them to a snapshot, is exact."
    )
    def cut_back(self, model: TinyModel) -> None:
        """See the statement."""
        states.cut_back(model)

    @clause("ARCH-12", "Two sequences that share a block and part inside the next each have their own bits.")
    def fork(self, model: TinyModel) -> None:
        """See the statement."""
        states.fork(model)

    @clause("ARCH-13", "A restored sequence drafts and commits like one that never stopped.")
    def commit_after_restore(self, model: TinyModel) -> None:
        """See the statement."""
        states.commit_after_restore(model)

    @clause(
        "ARCH-14",
        "A greedy answer is the same plain and with drafts that are always right, always wrong, branching, or random "
        "trees.",
    )
    def greedy(self, model: TinyModel) -> None:
        """See the statement."""
        answers.greedy(model)

    @clause("ARCH-15", "A sampled answer with the same seed is the same plain and with such drafts.")
    def sampled(self, model: TinyModel) -> None:
        """See the statement."""
        answers.sampled(model)

    @clause("ARCH-16", "The number of threads changes no bit.")
    def threads(self, model: TinyModel) -> None:
        """See the statement."""
        rows.threads(model)

    @clause("ARCH-17", "A process whose kernels are compiled for a plainer CPU gives the same bits.")
    def lowerings(self, model: TinyModel) -> None:
        """See the statement."""
        lowerings.lowerings_agree(self.family(), f"{model.variant.name}-{model.tensor_type}")

    @clause("ARCH-18", "Logits agree with the NumPy reference within the stated table.")
    def reference(self, model: TinyModel) -> None:
        """See the statement."""
        agreement.agrees_with_reference(model)

    @clause("ARCH-19", "A prediction block's row depends on its path alone and leaves the trunk's states alone.")
    def prediction(self, model: TinyModel) -> None:
        """See the statement."""
        prediction.prediction_depends_on_its_path(model)

    @clause("ARCH-20", "A prediction block agrees with the NumPy reference within the stated table.")
    def prediction_reference(self, model: TinyModel) -> None:
        """See the statement."""
        prediction.prediction_agrees_with_reference(model)

    @clause(
        "ARCH-21",
        "A file with a tensor that the architecture does not know is refused by the tensor's name.",
        "variant",
    )
    def unknown_tensor(self, model: TinyModel) -> None:
        """See the statement."""
        recorded.unknown_tensor_refused(model)

    @clause(
        "ARCH-22", "A file without a tensor that is not declared optional is refused by the tensor's name.", "variant"
    )
    def missing_tensor(self, model: TinyModel) -> None:
        """See the statement."""
        recorded.missing_tensor_refused(model, self.family())

    @clause("ARCH-23", "A file with a tensor of another shape is refused by the tensor's name.", "variant")
    def wrong_shape(self, model: TinyModel) -> None:
        """See the statement."""
        recorded.wrong_shape_refused(model)

    @clause(
        "ARCH-24",
        "A missing metadata key is refused by its own name, or is as good as its declared default.",
        "variant",
    )
    def missing_key(self, model: TinyModel) -> None:
        """See the statement."""
        recorded.missing_key_refused(model)

    @clause("ARCH-25", "What the capabilities deny no variant shows.", "plugin")
    def declared_no(self, family: ModelFamily) -> None:
        """See the statement."""
        recorded.declared_no_is_no(family)

    @clause("ARCH-26", "What the capabilities claim some variant shows.", "plugin")
    def declared_yes(self, family: ModelFamily) -> None:
        """See the statement."""
        recorded.declared_yes_is_shown(family)

    @clause(
        "ARCH-27",
        "Variants have names of their own and record, every time, one program of the sizes they say.",
        "plugin",
    )
    def variants(self, family: ModelFamily) -> None:
        """See the statement."""
        recorded.variants_are_usable(family)

    @clause("ARCH-28", "Every tensor format of the suite is stored in some variant.", "plugin")
    def every_format(self, family: ModelFamily) -> None:
        """See the statement."""
        recorded.every_format_is_stored(family)

    @clause(
        "ARCH-29",
        "An answer ends where plain decoding ends, whatever was guessed beyond, and leaves nothing of it in the state.",
        "variant",
    )
    def endings(self, model: TinyModel) -> None:
        """See the statement."""
        endings.ends_where_plain_decoding_ends(model)
