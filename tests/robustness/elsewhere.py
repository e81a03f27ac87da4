"""Troubles whose tests live with the part that they are about."""

from __future__ import annotations

from tests import (
    test_batch,
    test_executor_usage,
    test_interrupted,
    test_leaks,
    test_optimizer_step,
    test_out_of_memory,
    test_plan,
    test_real_limit,
    test_shapes,
    test_watch,
)
from tests.solvers import test_backends, test_honest

from .cases import case

case("Prediction", "the optimizer's own temporaries are not counted", "exact", threads="pytorch#97712")(
    test_optimizer_step.test_real_steps_take_what_is_predicted
)
case("Prediction", "an optimizer that nobody knows raises the budget", "fallback", threads="torchtitan#4636")(
    test_optimizer_step.test_what_cannot_be_tried_is_taken_to_need_a_copy
)
case("Prediction", "lengths, masks and batches other than planned", "exact", threads="torchtune#1654, litgpt#794")(
    test_shapes.test_other_shapes
)
case("Prediction", "a larger batch than planned, unannounced", "fallback", threads="pytorch#31252")(
    test_batch.test_a_larger_batch_warns_once_with_the_predicted_peak
)
case("Prediction", "it dies some forty steps in", "fallback", threads="pytorch/rfcs#108")(
    test_watch.test_a_larger_batch_is_planned_anew
)
case("Prediction", "the plain step does not fit, so it can't be measured", "fallback", threads="pytorch#27600")(
    test_out_of_memory.test_scaled_from_two_sizes_that_fit
)
case("Prediction", "a planned step dies all the same", "fallback", threads="pytorch#35901")(
    test_out_of_memory.test_a_plan_that_dies_is_made_smaller
)
case("Prediction", "the measured limit is not the real one", "exact", threads="pytorch#13412, pytorch#29554")(
    test_real_limit.test_plain_dies_and_planned_trains
)
case("Prediction", "a saved plan meets another model", "refused")(
    test_plan.test_another_model_is_refused_and_the_file_stays
)
case("Company", "Ctrl-C, anywhere in fitting", "as plain")(test_interrupted.test_interrupted_anywhere)
case("Company", "an error, anywhere in fitting", "fallback")(
    test_interrupted.test_an_error_anywhere_is_undone_or_planned_around
)
case("Company", "two models train in two threads", "exact")(test_executor_usage.test_two_models_in_two_threads)
case("Autograd", "memory grows with forwards that have no backward, with errors, with Ctrl-C", "exact",
     threads="pytorch#154642, pytorch#84413, DeepSpeed#1698")(test_leaks.test_growth_is_that_of_plain)  # fmt: skip
case("Engines", "CBC is missing or broken", "fallback", threads="pulp#866, pulp#765, snakemake#3007")(
    test_backends.test_a_broken_cbc_is_replaced_by_highs
)
case("Engines", "no engine at all", "fallback")(
    test_backends.test_without_any_engine_the_greedy_answer_comes_with_a_note
)
case("Engines", "a temporary directory with a space in its name", "exact", threads="pulp#272, pulp#811")(
    test_backends.test_cbc_in_a_temporary_directory_with_a_space
)
case("Engines", "engines print", "exact", threads="pulp#442, pulp#735")(test_backends.test_nothing_is_printed)
case("Engines", "names that collide", "exact", threads="pulp#87, pulp#361")(
    test_backends.test_names_and_numbers_that_engines_can_read
)
case("Engines", "the time limit is not kept in presolve", "exact", threads="pulp#699")(
    test_backends.test_a_limit_that_ends_before_the_first_node
)
case("Engines", "a forked process hangs", "exact", threads="pulp#737")(test_backends.test_a_forked_process_can_solve)
case("Engines", "Optimal, where a limit stopped it", "exact")(test_backends.test_what_a_limit_stopped_is_not_optimal)
case("Engines", "Infeasible, where it is not", "fallback")(test_backends.test_highs_is_asked_where_cbc_says_infeasible)
case("Engines", "an answer that breaks its own rows", "fallback")(
    test_backends.test_an_engine_that_lies_is_caught_by_the_referee
)
case("Engines", "no layers, one layer, no time, ties", "exact", threads="torchtitan#4636, ColossalAI#1521")(
    test_honest.TestDegenerate.test_no_regions
)
case("Engines", "the same step has another plan in another process", "exact")(
    test_honest.test_the_same_step_has_the_same_plan_in_every_process
)
