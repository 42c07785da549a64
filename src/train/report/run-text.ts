/** The sentences that a training prints: what it trains and where, before the first step; what came of it, after the last. */
import { isAbsolute, relative } from "node:path";
import { chatTemplateFile } from "../../config/chat-template-file.ts";
import { hasEncoder, wandbFolder } from "../../config/derive.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { countParameters } from "../../models/language/counts.ts";
import { isAdapterName, languageLora } from "../../models/lora.ts";
import { encoderConfig } from "../../models/vision/from-configuration.ts";
import { projectorParameters } from "../../models/vision/projector.ts";
import { visionEncoder } from "../../models/vit/tower.ts";
import type { RowTransportName } from "../../native/abi.ts";
import type { Observer } from "../../observe/step-report.ts";
import { languageModule, visionModule, type World } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { elementCount } from "../../tensor/index.ts";
import type { Run } from "../assemble.ts";
import type { RunData } from "../feed/batch-source.ts";
import type { TrainingSummary } from "../loop.ts";

/** The first sentence: model, ranks, device and frozen parts. */
export function introduction(c: TrainingConfiguration, { topology }: Run, world: World): string {
	const { name, threads } = world.device.describe();
	const millions = (count: number) => `${(count / 1e6).toFixed(2)} M parameters`;
	const language = languageText(c, millions);
	const what = hasEncoder(c) ? `${encoderText(c, millions)} and ${language}` : language;
	const of = topology.modules.map(({ name, size }) => `${size} for ${moduleTitle(name)}`);
	const sizes = of.length === 1 ? "" : ` (${of.join(", ")})`;
	const ranks = world.size === 1 ? "" : `${counted(world.size, "rank")}${sizes}, `;
	const on = `${name}, ${ranks}${counted(threads, "thread")}${world.size === 1 ? "" : " each"}`;
	return `Training ${what} on ${on}.${frozenText(c)}`;
}

/**
 * The sentences that say which text is trained on, what of it counts in the loss, and how images are resized; none for mock data.
 * Data sets of a blend may have settings of their own.
 */
export function dataSentences(c: TrainingConfiguration): string[] {
	const { lossRoles } = c;
	if (c.datasetProvider === "mock") return [];
	if (c.datasetProvider === "indexed") {
		const parts = c.resetAttentionMask ? ", documents apart" : "";
		const ends = c.eodMaskLoss ? "all but the first token of documents" : "all of them";
		return [`Text: documents of token ids${parts}, loss on ${ends}.`];
	}
	if (c.datasetProvider === "tokens") return ["Text: token ids as they are, loss on all of them."];
	if (c.datasetProvider === "text") return ["Text: plain, loss on all of it."];
	const text = templateText(c);
	const assistants = c.conversationTemplate === "chatml" || c.conversationTemplate === "jinja";
	const whole = assistants ? "the assistant's turns" : "all of it";
	const counts = lossRoles === null ? whole : `the turns of ${lossRoles.join(" and ")}`;
	const documents = counts === "all of it" ? "" : ", and on all text without turns";
	return [`Text: ${text}, loss on ${counts}${documents}.`, ...(hasEncoder(c) ? [`Images: ${imageText(c)}.`] : [])];
}

function templateText({ conversationTemplate, chatTemplate, tokenizer }: TrainingConfiguration): string {
	if (conversationTemplate === "jinja") return `chat template of ${shownPath(chatTemplate ?? tokenizer!)}`;
	if (conversationTemplate === "pretraining") return "turns after their speakers' names";
	if (conversationTemplate === "chatml") return "chatml";
	if (tokenizer === null) return "plain (no chat template is given)";
	const place = shownPath(tokenizer);
	return `plain (${chatTemplateFile(tokenizer) === null ? `${place} has no chat template` : `without the chat template of ${place}`})`;
}

function imageText(c: TrainingConfiguration): string {
	if (c.dynamicResolution && c.maxPixels !== null) {
		const unit = c.patchDim * (c.pixelShuffle ? 2 : 1);
		return `resized to multiples of ${unit} pixels, of ${c.minPixels} to ${c.maxPixels} together (max-pixels)`;
	}
	if (c.dynamicResolution) {
		const { dynamicResolutionMinPatches: least, dynamicResolutionMaxPatches: most } = c;
		const count = most === 0 ? `at least ${least}` : `${least} to ${most}`;
		return `resized to ${count} patches of ${c.patchDim} × ${c.patchDim} pixels (dynamic-resolution)`;
	}
	if (c.imageGridPinpoints !== null) {
		const whole = `whole in ${c.imgW} × ${c.imgH} pixels`;
		return `${whole} and in tiles of it, by the best of ${counted(c.imageGridPinpoints.length, "size")}; of samples with several, each in one square`;
	}
	if (!c.useTiling) return `resized to ${c.imgW} × ${c.imgH} pixels, whatever their proportions`;
	const thumbnail = c.useThumbnail ? " and a thumbnail" : "";
	return `cut into ${c.minNumTiles} to ${c.maxNumTiles} tiles of ${c.imgH} × ${c.imgH} pixels${thumbnail} (use-tiling)`;
}

/** Such as "the encoder": a module in sentences. */
function moduleTitle(name: string): string {
	if (name === languageModule) return "the language model";
	return name === visionModule ? "the encoder" : name;
}

/** Names the frozen parts; empty if none is frozen. */
function frozenText(c: TrainingConfiguration): string {
	const frozen = [
		...(hasEncoder(c) && c.freezeVit ? ["the vision tower"] : []),
		...(hasEncoder(c) && c.freezeProjection ? ["the projector"] : []),
		...(c.freezeLm || languageLora(c)?.targets.length === 0 ? ["the language model"] : []),
	];
	if (frozen.length === 0) return "";
	return ` Frozen: ${frozen.join(" and ")}.`;
}

function languageText(c: TrainingConfiguration, millions: (count: number) => string): string {
	const { total, adapters } = countParameters(c);
	const model = `${millions(total)} (${c.hybridLayerPattern})`;
	return adapters === 0 ? model : `adapters of ${millions(adapters)} for ${model}`;
}

/** Describes how rows reach experts of other ranks. */
export const rowTransports = {
	host: "Rows for experts of other ranks go through the host's shared memory.",
	peers: "Rows for experts of other ranks go from GPU to GPU, which open each other's memory: the host waits for none.",
	counts:
		"Rows for experts of other ranks go as messages of NCCL, because these GPUs do not open each other's memory: the host " +
		"waits for the rows' counts in every layer of experts.",
} as const satisfies Record<RowTransportName, string>;

function encoderText(c: TrainingConfiguration, millions: (count: number) => string): string {
	const { name, tower, projector } = visionEncoder(encoderConfig(c));
	const specs = [...tower.parameters(), ...projectorParameters(projector, name)];
	const count = (wanted: (name: string) => boolean) =>
		specs.reduce((sum, { name, shape }) => (wanted(name) ? sum + elementCount(shape) : sum), 0);
	const adapters = count(isAdapterName);
	const model = `${millions(count((name) => !isAdapterName(name)))} of a vision encoder`;
	return adapters === 0 ? model : `adapters of ${millions(adapters)} for ${model}`;
}

/** Prints the results of a training: steps, held-out losses, captions, and the files it has written. */
export function summarise(
	c: TrainingConfiguration,
	summary: TrainingSummary,
	data: RunData,
	observer: Observer,
	captions: readonly string[],
): void {
	if (summary.steps > 0) {
		observer.note(
			`Trained ${counted(summary.steps, "step")} in ${summary.seconds.toFixed(1)} s (${Math.round(summary.tokens / summary.seconds)} tokens/s): loss ${summary.firstLoss.toFixed(4)} → ${summary.lastLoss.toFixed(4)}.`,
		);
	}
	if (summary.stop !== null) observer.note(summary.stop.reason);
	if (summary.heldOutLoss !== null) {
		observer.note(`Held-out loss: ${summary.heldOutLoss.toFixed(4)} a token.`);
		for (const sentence of summary.heldOutSentences) observer.note(sentence);
		if (data.heldOutBytes) {
			const bits = summary.heldOutLoss / Math.LN2;
			observer.note(
				`Held-out bits per byte: ${bits.toFixed(4)} (unigram entropy of the same bytes ${unigramEntropy(data.heldOutBytes).toFixed(4)}, bigram ${bigramEntropy(data.heldOutBytes).toFixed(4)}).`,
			);
		}
	}
	for (const line of captions) observer.note(line);
	const files = [
		["log", c.logJson],
		["TensorBoard", c.tensorboardDir],
		["MLflow", c.mlflowDir],
		["Weights & Biases", wandbFolder(c)],
		["checkpoints", c.save],
		["weights", c.saveHf],
		["adapters", c.savePeft],
	].filter(([, path]) => path);
	if (c.save === null && c.saveHf === null && c.savePeft === null) {
		const adapters = c.loraRank === null ? "neither --save nor --save-hf" : "none of --save, --save-hf and --save-peft";
		observer.note(`The weights are not kept: ${adapters} is given.`);
	}
	if (files.length > 0)
		observer.note(`Files: ${files.map(([what, path]) => `${what} ${shownPath(path!)}`).join(", ")}.`);
}

/** Paths of a file of keys are absolute: one below the working folder is shown from there. */
export function shownPath(path: string): string {
	const below = relative(process.cwd(), path);
	return isAbsolute(path) && below !== "" && !below.startsWith("..") ? below : path;
}

// How well simple models could code a byte string: the yardsticks beside a trained model's bits per byte.

/** Entropy of the byte frequencies, bits per byte. */
function unigramEntropy(bytes: ArrayLike<number>): number {
	const counts = new Float64Array(256);
	for (let i = 0; i < bytes.length; i++) counts[bytes[i]!]! += 1;
	return entropy(counts, bytes.length);
}

/** Entropy of a byte given the byte before it, from the string's own pair frequencies, bits per byte. */
function bigramEntropy(bytes: ArrayLike<number>): number {
	const pairs = new Float64Array(65536);
	const firsts = new Float64Array(256);
	for (let i = 1; i < bytes.length; i++) {
		pairs[bytes[i - 1]! * 256 + bytes[i]!]! += 1;
		firsts[bytes[i - 1]!]! += 1;
	}
	const total = bytes.length - 1;
	return entropy(pairs, total) - entropy(firsts, total);
}

function entropy(counts: Float64Array, total: number): number {
	return counts.reduce((bits, count) => (count === 0 ? bits : bits - (count / total) * Math.log2(count / total)), 0);
}
