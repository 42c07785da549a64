/**
 * Checks a run's data before anything is trained, so that mistakes are reported at once rather than by a rank or by the first
 * evaluation.
 */
import { dataLanes, hasEncoder, hasTokenizer } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { ReadGuard } from "../native/files.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { openIndexedText } from "./megatron/from-configuration.ts";
import { openDatasets, timeoutOf } from "./routing/from-configuration.ts";
import { configuredTokenizer, nameOfTokenizer, requireRoom } from "./text/configured-tokenizer.ts";
import { checkTextFile } from "./text/token-source.ts";
import { taskOfDataset } from "./vision-language/data-settings.ts";
import { checkTrainable } from "./vision-language/dataset-checks.ts";
import { taskOf } from "./vision-language/from-configuration.ts";

/** Opens the data that `c` names, reading little of it. Throws a UserError for the first thing that cannot be trained on. */
export function checkData(c: TrainingConfiguration): void {
	switch (c.datasetProvider) {
		case "energon":
			checkTokenizer(c);
			checkDatasets(c);
			if (c.evalIters > 0 || c.evalCaptions > 0) checkDatasets(c, { evaluation: true });
			break;
		case "text":
			if (hasTokenizer(c)) checkTokenizer(c);
			checkTextFiles(c);
			break;
		case "indexed": {
			using _ = new ReadGuard(timeoutOf(c));
			openIndexedText(c)[Symbol.dispose]();
			break;
		}
		case "mock":
			refuseMockText(c);
			break;
	}
}

function checkTextFiles(c: TrainingConfiguration): void {
	using _ = new ReadGuard(timeoutOf(c));
	checkTextFile(c.dataPath!);
	if (c.validDataPath !== null) checkTextFile(c.validDataPath);
}

/** Mock data are pictures with captions. */
export function refuseMockText(c: TrainingConfiguration): void {
	if (c.modelProvider !== "hybrid") return;
	throw new UserError("A language model without an encoder trains on files: give --data-path.");
}

/** The tokenizer of a run against its vocabulary and image token. */
function checkTokenizer(c: TrainingConfiguration): void {
	const tokenizer = configuredTokenizer(c);
	requireRoom(tokenizer, c);
	const unknown = (c.dataSpecialTokens ?? []).find((token) => !tokenizer.specialTokens.includes(token));
	if (unknown !== undefined) {
		throw new UserError(
			`--data-special-tokens: ${JSON.stringify(unknown)} is not a special token of ${hasTokenizer(c) ? nameOfTokenizer(c) : "bytes"}.`,
		);
	}
	if (!hasEncoder(c)) return;
	const text = tokenizer.ordinaryText(c.imageTokenId);
	if (text !== null) {
		throw new UserError(
			`--image-token-id ${c.imageTokenId} is the ordinary token ${JSON.stringify(text)} of ${nameOfTokenizer(c)}: name a special token, or an id that the tokenizer does not use.`,
		);
	}
}

/** The data sets of the training, or of the evaluations: index, split part, configuration, kind of samples. */
export function checkDatasets(c: TrainingConfiguration, { evaluation = false } = {}): void {
	using _ = new ReadGuard(timeoutOf(c));
	const opened = openDatasets(c, { evaluation });
	checkTrainable(opened.datasets, taskOf(c));
	if (evaluation) requireBatches(c, opened);
}

/** Whether pictures of the training are decoded as Energon does, which transformers does for no file. */
export function decodesAsEnergon(c: TrainingConfiguration): boolean {
	if (c.datasetProvider !== "energon" || !hasEncoder(c)) return false;
	using _ = new ReadGuard(timeoutOf(c));
	const task = taskOf(c);
	return openDatasets(c).datasets.some(
		({ path, subflavors }) => taskOfDataset(task, subflavors, path).imageDecoding === "energon",
	);
}

/** An evaluation passes over its samples without a partial batch; fewer than a batch for each lane would give it nothing. */
function requireBatches(c: TrainingConfiguration, { datasets, path, part }: ReturnType<typeof openDatasets>): void {
	if (datasets.some(({ repetitions }) => repetitions !== null)) return;
	const samples = datasets.reduce((sum, dataset) => sum + dataset.samples, 0);
	const least = c.evalMicroBatchSize * dataLanes(c);
	if (samples >= least) return;
	throw new UserError(
		`The part ${part} of ${path} has ${counted(samples, "sample")}, and an evaluation needs ${least}: eval-micro-batch-size (${c.evalMicroBatchSize}) for each of ${counted(dataLanes(c), "data lane")}.`,
	);
}
