/**
 * What the configuration can say but this version cannot do yet. `--print-config` shows such a configuration; training
 * with it is refused, everything together. A feature that is built loses its line here.
 */
import { UserError } from "../native/errors.ts";
import { dataLanes, hasEncoder } from "./derive.ts";
import type { Key, TrainingConfiguration } from "./schema.ts";

type Unbuilt = readonly [key: Key, what: string, wanted: (configuration: TrainingConfiguration) => boolean];

const unbuilt: readonly Unbuilt[] = [
	["model-provider", "the vision encoder", hasEncoder],
	["llm-pp", "pipeline parallelism", (c) => c.llmPp > 1],
	["dataset-provider", "training from Energon data", (c) => c.datasetProvider === "energon"],
	["dataset-provider", "mock data", (c) => c.datasetProvider === "mock"],
	["save", "saving checkpoints", (c) => c.save !== null],
	["load", "loading checkpoints", (c) => c.load !== null],
	["pretrained-checkpoint", "loading checkpoints", (c) => c.pretrainedCheckpoint !== null],
	["exit-interval", "exits that save", (c) => c.exitInterval !== null],
	["exit-duration-in-mins", "exits that save", (c) => c.exitDurationInMins !== null],
	["exit-signal-handler", "exits that save", (c) => c.exitSignalHandler],
	["freeze-lm", "training without the language model", (c) => c.freezeLm],
	["save-hf", "Hugging Face weights from several ranks", (c) => c.saveHf !== null && languageRanks(c) > 1],
	["timing-log-level", "timers", (c) => c.timingLogLevel > 0],
	["grad-reduce-in-bf16", "reducing gradients in bf16", (c) => c.gradReduceInBf16],
];

function languageRanks(c: TrainingConfiguration): number {
	return dataLanes(c) * c.llmTp;
}

/** Throws a UserError that names everything the configuration wants and this version lacks. */
export function refuseUnbuilt(configuration: TrainingConfiguration): void {
	const wanted = unbuilt.filter(([, , is]) => is(configuration));
	if (wanted.length === 0) return;
	throw new UserError(`Not built yet: ${wanted.map(([key, what]) => `${what} (${key})`).join(", ")}.`);
}
