/**
 * Features that the configuration can ask for but this version does not have yet. `--print-config` shows such a
 * configuration; training with it is refused, with all of them named together. A feature that is built loses its line
 * here.
 */
import { UserError } from "../native/errors.ts";
import type { Key, TrainingConfiguration } from "./schema.ts";

type Unbuilt = readonly [key: Key, what: string, wanted: (configuration: TrainingConfiguration) => boolean];

const unbuilt: readonly Unbuilt[] = [["grad-reduce-in-bf16", "reducing gradients in bf16", (c) => c.gradReduceInBf16]];

/** Throws a UserError that names everything the configuration wants and this version lacks. */
export function refuseUnbuilt(configuration: TrainingConfiguration): void {
	const wanted = unbuilt.filter(([, , is]) => is(configuration));
	if (wanted.length === 0) return;
	throw new UserError(`Not built yet: ${wanted.map(([key, what]) => `${what} (${key})`).join(", ")}.`);
}
