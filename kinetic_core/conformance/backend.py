"""The suite of kernel backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kinetic_core.conformance import agreement, blocks, contract, lowerings, prediction, rows, states
from kinetic_core.conformance.formats import FORMATS
from kinetic_core.conformance.models import ModelFamily, TinyModel
from kinetic_core.conformance.on_models import OnModels
from kinetic_core.conformance.suite import Conformance, clause
from kinetic_core.reference.tiny_hybrid import KEY, TinyHybrid


class BackendConformance(OnModels, Conformance, kind="backend"):
    """Proves a backend exact on every variant of the miniature hybrid, which has every operation::

        class TestDevice(BackendConformance):
            target = DeviceBackend
            name = "device"

    formats: the tensor formats that the models are stored in.
    """

    formats: ClassVar[Sequence[str]] = FORMATS

    @classmethod
    def make_family(cls) -> ModelFamily:
        """The miniature hybrid on the target."""
        return ModelFamily(TinyHybrid, KEY, cls.target, cls.formats)

    @clause("BACK-01", "A prompt in one batch gives every row the bits that tokens run one by one give.")
    def batch(self, model: TinyModel) -> None:
        """See the statement."""
        rows.batch_equals_one_by_one(model)

    @clause("BACK-02", "However a prompt is split into steps, every row and the states have the same bits.")
    def split(self, model: TinyModel) -> None:
        """See the statement."""
        rows.any_split(model)

    @clause("BACK-03", "Other sequences in the same step change no bit.")
    def neighbours(self, model: TinyModel) -> None:
        """See the statement."""
        rows.neighbours(model)

    @clause("BACK-04", "Which blocks and slot a sequence has, and what lay in them before, changes no bit.")
    def anywhere(self, model: TinyModel) -> None:
        """See the statement."""
        rows.anywhere(model)

    @clause("BACK-05", "A row of a draft tree has the bits of its path run alone.")
    def draft_rows(self, model: TinyModel) -> None:
        """See the statement."""
        rows.draft_row_equals_its_path(model)

    @clause("BACK-06", "Drafts that are not committed leave no trace: states, blocks and later rows are as without.")
    def no_trace(self, model: TinyModel) -> None:
        """See the statement."""
        rows.drafts_leave_no_trace(model)

    @clause("BACK-07", "Committing drafts leaves the bits that plain decoding leaves.")
    def commit(self, model: TinyModel) -> None:
        """See the statement."""
        rows.commit_equals_plain(model)

    @clause("BACK-08", "Only a path of drafts of the last step can be committed, and once.")
    def only_paths(self, model: TinyModel) -> None:
        """See the statement."""
        rows.commits_only_paths(model)

    @clause("BACK-09", "Going back to a copy of slot and block continues with the same bits.")
    def restore_in_memory(self, model: TinyModel) -> None:
        """See the statement."""
        states.restore_in_memory(model)

    @clause("BACK-10", "A state written to a file continues in this and in another executable with the same bits.")
    def restore_from_a_file(self, model: TinyModel) -> None:
        """See the statement."""
        states.restore_from_a_file(model)

    @clause("BACK-11", "A state copied after a named row of a batch is the state of exactly that row.")
    def named_row(self, model: TinyModel) -> None:
        """See the statement."""
        states.state_after_a_named_row(model)

    @clause(
        "BACK-12", "A sequence cut back, without recurrent states to any length, with them to a snapshot, is exact."
    )
    def cut_back(self, model: TinyModel) -> None:
        """See the statement."""
        states.cut_back(model)

    @clause("BACK-13", "Two sequences that share a block and part inside the next each have their own bits.")
    def fork(self, model: TinyModel) -> None:
        """See the statement."""
        states.fork(model)

    @clause("BACK-14", "A restored sequence drafts and commits like one that never stopped.")
    def commit_after_restore(self, model: TinyModel) -> None:
        """See the statement."""
        states.commit_after_restore(model)

    @clause("BACK-15", "The number of threads changes no bit.")
    def threads(self, model: TinyModel) -> None:
        """See the statement."""
        rows.threads(model)

    @clause("BACK-16", "A process whose kernels are compiled for a plainer CPU gives the same bits.")
    def lowerings(self, model: TinyModel) -> None:
        """See the statement."""
        lowerings.lowerings_agree(self.family(), f"{model.variant.name}-{model.tensor_type}")

    @clause("BACK-17", "Logits agree with the NumPy reference within the stated table.")
    def reference(self, model: TinyModel) -> None:
        """See the statement."""
        agreement.agrees_with_reference(model)

    @clause("BACK-18", "A prediction block's row depends on its path alone and leaves the trunk's states alone.")
    def prediction(self, model: TinyModel) -> None:
        """See the statement."""
        prediction.prediction_depends_on_its_path(model)

    @clause("BACK-19", "A prediction block agrees with the NumPy reference within the stated table.")
    def prediction_reference(self, model: TinyModel) -> None:
        """See the statement."""
        prediction.prediction_agrees_with_reference(model)

    @clause("BACK-20", "Candidates are the best of the whole distribution, in (score descending, id ascending) order.")
    def candidates(self, model: TinyModel) -> None:
        """See the statement."""
        contract.candidates_are_the_best(model)

    @clause("BACK-21", "A batch that breaks the contract is refused and changes nothing.")
    def bad_batches(self, model: TinyModel) -> None:
        """See the statement."""
        contract.bad_batches_are_refused(model)

    @clause("BACK-22", "Saved bytes of another length are refused.")
    def bad_bytes(self, model: TinyModel) -> None:
        """See the statement."""
        contract.bad_bytes_are_refused(model)

    @clause(
        "BACK-23",
        "The kernel digest is the same for equal loads and differs by cache type; a closed executable refuses.",
    )
    def digests(self, model: TinyModel) -> None:
        """See the statement."""
        contract.digests_and_closing(model)

    @clause("BACK-24", "What the capabilities deny is refused.")
    def declared_no(self, model: TinyModel) -> None:
        """See the statement."""
        contract.declared_no_is_refused(model)

    @clause(
        "BACK-25",
        "Equal scores, zeros of both signs included, go to the lowest token id, in draft rows too.",
        "plugin",
    )
    def ties(self, family: ModelFamily) -> None:
        """See the statement."""
        contract.ties_go_to_the_lowest_id(family)

    @clause("BACK-26", "A wanted logit that is NaN is a NumericalError.", "plugin")
    def nan(self, family: ModelFamily) -> None:
        """See the statement."""
        contract.nan_is_an_error(family)

    @clause(
        "BACK-27",
        "In every block format a matrix times integers that 8 bits hold is right to float precision.",
        "plugin",
    )
    def block_formats(self, family: ModelFamily) -> None:
        """See the statement."""
        blocks.blocks_are_multiplied_right(family)
