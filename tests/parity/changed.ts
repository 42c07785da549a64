/** Changes of the run that a reference folder describes. */
import type { RunSpecification } from "../../src/train/run-specification.ts";

type Change<Part extends keyof RunSpecification> = (
	part: NonNullable<RunSpecification[Part]>,
) => NonNullable<RunSpecification[Part]>;

/** A change of one part of a run that has it. */
export function changed<Part extends keyof RunSpecification>(part: Part, change: Change<Part>) {
	return (run: RunSpecification): RunSpecification => ({ ...run, [part]: change(run[part]!) });
}
