/** Checks of the keys of Energon data. */
import { hasEncoder, hasTokenizer } from "../derive.ts";
import { type Key, propertyOf, type TrainingConfiguration } from "../schema.ts";
import { type Check, unless } from "./check.ts";

/** Applies a check only to configurations with Energon data. */
function energon(check: Check): Check {
	return (c) => (c.datasetProvider === "energon" ? check(c) : null);
}

/** Checks that an image's side in pixels is a multiple of the tower's patches. */
function sideFits(key: Key, side: (c: TrainingConfiguration) => number): Check {
	return energon((c) => {
		const unit = c.patchDim * (c.pixelShuffle ? 2 : 1);
		const fixed = hasEncoder(c) && !c.dynamicResolution;
		// torchvision's patches leave the rest out, as a convolution does.
		const fits = side(c) % unit === 0 || (c.imageResampling === "torchvision" && !c.pixelShuffle && side(c) >= unit);
		return unless(!fixed || fits, key, `allowed is a multiple of ${unit}`);
	});
}

/** Checks that a token that the data insert is in the vocabulary. */
function inVocabulary(key: Key, id: (c: TrainingConfiguration) => number | null): Check {
	return energon((c) => unless((id(c) ?? 0) < c.vocabSize, key, `allowed is less than vocab-size (${c.vocabSize})`));
}

/** Rows (tokens of the sequence) that the tower outputs for an image or tile of `patches` patches. */
function rowsOf(c: TrainingConfiguration, patches: number): number {
	if (c.pixelShuffle) return patches / 4;
	return c.disableVisionClassToken ? patches : patches + c.classTokenLen;
}

/** Patches and rows of the smallest image that the configuration makes, and of every image where all have one size. */
function imageRows(c: TrainingConfiguration): {
	readonly patches: number;
	readonly rows: number;
	readonly fixed: boolean;
} {
	if (c.dynamicResolution) {
		const patches = Math.max(c.dynamicResolutionMinPatches, c.pixelShuffle ? 4 : 1);
		return { patches, rows: Math.ceil(rowsOf(c, patches)), fixed: false };
	}
	const patches = Math.floor(c.imgH / c.patchDim) * Math.floor(c.imgW / c.patchDim);
	const rows = rowsOf(c, patches) + Number(c.visionImageNewline);
	return { patches, rows, fixed: !c.useTiling && c.imageGridPinpoints === null };
}

/** Whether a text is a JSON object, or not given. */
function isJsonObject(text: string | null): boolean {
	if (text === null) return true;
	try {
		const value: unknown = JSON.parse(text);
		return typeof value === "object" && value !== null && !Array.isArray(value);
	} catch {
		return false;
	}
}

/** Whether a text is a date of the calendar. */
function isDay(text: string): boolean {
	const day = new Date(`${text}T00:00:00Z`);
	return /^\d{4}-\d{2}-\d{2}$/.test(text) && !Number.isNaN(day.getTime()) && day.toISOString().startsWith(text);
}

/** Requirements of image-grid-pinpoints. */
const anyResolution: readonly (readonly [what: string, holds: (c: TrainingConfiguration) => boolean])[] = [
	["vision-image-newline", (c) => !hasEncoder(c) || c.visionImageNewline],
	["image-resampling torchvision", (c) => c.imageResampling === "torchvision"],
	["neither dynamic-resolution nor use-tiling", (c) => !c.dynamicResolution && !c.useTiling],
	["img-w equal to img-h", (c) => c.imgH === c.imgW],
	[
		"sizes that are multiples of img-h",
		(c) => c.imageGridPinpoints!.every((size) => size.split("x").every((side) => Number(side) % c.imgH === 0)),
	],
	["no mrope-section", (c) => c.mropeSection === null],
];

export const energonChecks: readonly Check[] = [
	energon((c) => {
		if (!hasEncoder(c)) return null;
		const { rows } = imageRows(c);
		const key = c.dynamicResolution ? "dynamic-resolution-min-patches" : "img-h";
		return unless(
			rows < c.seqLength,
			key,
			`an image takes at least ${rows} tokens; allowed is less than seq-length (${c.seqLength})`,
		);
	}),
	energon((c) => {
		const { patches } = imageRows(c);
		const fits = !hasEncoder(c) || (c.packingMaxPatches ?? patches) >= patches;
		return unless(fits, "packing-max-patches", `allowed is at least ${patches}, the patches of the smallest image`);
	}),
	energon((c) => {
		if (!hasEncoder(c) || c.imageSeqLength === null) return null;
		const { rows, fixed } = imageRows(c);
		if (!fixed) {
			const tiles = c.useTiling ? "use-tiling" : "image-grid-pinpoints";
			const key = c.dynamicResolution ? "dynamic-resolution" : tiles;
			return unless(false, "image-seq-length", `allowed only without ${key}: images have different numbers of tokens`);
		}
		return unless(c.imageSeqLength === rows, "image-seq-length", `allowed is ${rows}, the tokens of img-h × img-w`);
	}),
	energon((c) =>
		unless(
			!hasEncoder(c) || c.imageTokenId < c.vocabSize,
			"image-token-id",
			`allowed is less than vocab-size (${c.vocabSize})`,
		),
	),
	energon((c) =>
		unless(!(c.useTiling && c.dynamicResolution), "use-tiling", "allowed only without dynamic-resolution"),
	),
	energon((c) => unless(c.maxPixels === null || c.dynamicResolution, "max-pixels", "it needs dynamic-resolution")),
	energon((c) =>
		unless(
			c.maxPixels === null || c.minPixels <= c.maxPixels,
			"min-pixels",
			`allowed is at most max-pixels (${c.maxPixels})`,
		),
	),
	energon((c) =>
		unless(
			!c.useTiling || c.imgH === c.imgW,
			"img-w",
			`allowed with use-tiling is img-h (${c.imgH}): tiles are square`,
		),
	),
	...anyResolution.map(([what, holds]) =>
		energon((c) => unless(c.imageGridPinpoints === null || holds(c), "image-grid-pinpoints", `it needs ${what}`)),
	),
	energon((c) =>
		unless(
			!hasEncoder(c) || !c.visionImageNewline || c.imageGridPinpoints !== null,
			"vision-image-newline",
			"it needs image-grid-pinpoints, the sizes of images",
		),
	),
	(c) =>
		unless(
			!c.visionImageNewline || (!c.pixelShuffle && (c.classTokenLen === 0 || c.disableVisionClassToken)),
			"vision-image-newline",
			"allowed without pixel-shuffle, and without class tokens (class-token-len 0 or disable-vision-class-token)",
		),
	energon((c) =>
		unless(c.minNumTiles <= c.maxNumTiles, "min-num-tiles", `allowed is at most max-num-tiles (${c.maxNumTiles})`),
	),
	(c) =>
		unless(
			c.chatTemplate === null || c.conversationTemplate === "jinja",
			"conversation-template",
			"allowed with chat-template is jinja",
		),
	energon((c) =>
		unless(
			c.conversationTemplate !== "jinja" || c.chatTemplate !== null || c.tokenizer !== null,
			"conversation-template",
			"allowed without chat-template and tokenizer is plain, pretraining or chatml",
		),
	),
	energon((c) =>
		unless(
			c.conversationTemplate !== "jinja" || c.lossRoles === null || c.lossRoles.join() === "assistant",
			"loss-roles",
			"allowed with conversation-template jinja is assistant",
		),
	),
	energon((c) =>
		unless(isJsonObject(c.chatTemplateKwargs), "chat-template-kwargs", 'allowed is a JSON object, such as {"a": 1}'),
	),
	energon((c) =>
		unless(
			c.chatTemplateDate === null || isDay(c.chatTemplateDate),
			"chat-template-date",
			"allowed is a day, such as 2026-01-31",
		),
	),
	sideFits("img-h", (c) => c.imgH),
	sideFits("img-w", (c) => c.imgW),
	inVocabulary("data-begin-id", (c) => c.dataBeginId),
	inVocabulary("data-end-id", (c) => c.dataEndId),
	inVocabulary("data-pad-id", (c) => c.dataPadId),
	energon((c) =>
		unless(
			!hasEncoder(c) || hasTokenizer(c) || c.imageTokenId > 255,
			"image-token-id",
			"allowed without tokenizer is at least 256: lower ids are bytes",
		),
	),
	energon((c) =>
		unless(
			c.dataRouting === "lane" || c.numWorkers > 0,
			"num-workers",
			"allowed with data-routing routed is at least 1",
		),
	),
];

// Checks of the keys of Megatron's indexed data.

const ownKeys: readonly Key[] = [
	...(["train-data-path", "test-data-path", "data-args-path", "per-split-data-args-path"] as const),
	...(["full-validation", "reset-attention-mask", "reset-position-ids", "eod-mask-loss"] as const),
];
const otherPlaces: readonly Key[] = ["train-data-path", "data-args-path", "per-split-data-args-path"];

export const indexedChecks: readonly Check[] = [
	(c) => {
		const given = ownKeys.find((key) => c[propertyOf(key)] !== null && c[propertyOf(key)] !== false);
		if (c.datasetProvider === "indexed" || given === undefined) return null;
		return { key: given, message: "allowed only with dataset-provider indexed" };
	},
	(c) => {
		const given = (["data-path", ...otherPlaces] as const).filter((key) => c[propertyOf(key)] !== null);
		if (c.datasetProvider !== "indexed" || given.length === 1) return null;
		if (given.length === 0) return { key: "dataset-provider", message: "it needs data-path or train-data-path" };
		return { key: given[1]!, message: `allowed only without ${given[0]}` };
	},
	(c) =>
		unless(
			!c.resetPositionIds || c.resetAttentionMask || c.positionEmbeddingType === "none",
			"reset-position-ids",
			`allowed with position-embedding-type ${c.positionEmbeddingType} only together with reset-attention-mask`,
		),
];

// Checks of the keys that name a tokenizer.

export const tokenizerChecks: readonly Check[] = [
	({ tokenizerType: type, tokenizer }) =>
		unless(
			type === null || type === "GPT2BPETokenizer" || type === "NullTokenizer" || tokenizer !== null,
			"tokenizer-type",
			"it needs tokenizer-model, its file",
		),
	({ tokenizerType: type, vocabFile, mergeFile }) =>
		unless(
			type !== "GPT2BPETokenizer" || (vocabFile !== null && mergeFile !== null),
			"tokenizer-type",
			"it needs vocab-file and merge-file",
		),
	({ tokenizerType: type, tokenizer, vocabFile }) =>
		unless(
			type !== null || tokenizer === null || vocabFile === null,
			"vocab-file",
			"tokenizer is given too: allowed is one of them, or tokenizer-type with both",
		),
	({ vocabFile, mergeFile }) =>
		unless(
			(vocabFile === null) === (mergeFile === null),
			"vocab-file",
			"allowed is vocab-file and merge-file together",
		),
	(c) =>
		unless(
			!c.tokenizerType?.match(/SentencePiece|Llama2/) ||
				c.tokenizerSpecialTokens === null ||
				c.tokenizerSentencepieceLegacy,
			"tokenizer-special-tokens",
			"a SentencePiece model takes them only with tokenizer-sentencepiece-legacy",
		),
	({ nullTokenizerEodId: id, vocabSize }) =>
		unless(id === null || id < vocabSize, "null-tokenizer-eod-id", `allowed is less than vocab-size (${vocabSize})`),
];
