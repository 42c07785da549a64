/** What the keys of Energon data must satisfy together. */
import { type Check, unless } from "./check.ts";
import { hasEncoder } from "./derive.ts";
import type { Key, TrainingConfiguration } from "./schema.ts";

/** Asked only of a configuration that trains on Energon data. */
function energon(check: Check): Check {
	return (c) => (c.datasetProvider === "energon" ? check(c) : null);
}

/** An image's side, in pixels, that the tower takes. */
function sideFits(key: Key, side: (c: TrainingConfiguration) => number): Check {
	return energon((c) => {
		const unit = c.patchDim * (c.pixelShuffle ? 2 : 1);
		const fixed = hasEncoder(c) && !c.dynamicResolution;
		return unless(!fixed || side(c) % unit === 0, key, `allowed is a multiple of ${unit}`);
	});
}

/** A token that the data put in must be one of the vocabulary. */
function inVocabulary(key: Key, id: (c: TrainingConfiguration) => number | null): Check {
	return energon((c) => unless((id(c) ?? 0) < c.vocabSize, key, `allowed is less than vocab-size (${c.vocabSize})`));
}

export const energonChecks: readonly Check[] = [
	energon((c) =>
		unless(!(c.useTiling && c.dynamicResolution), "use-tiling", "allowed only without dynamic-resolution"),
	),
	energon((c) =>
		unless(
			!c.useTiling || c.imgH === c.imgW,
			"img-w",
			`allowed with use-tiling is img-h (${c.imgH}): tiles are square`,
		),
	),
	sideFits("img-h", (c) => c.imgH),
	sideFits("img-w", (c) => c.imgW),
	inVocabulary("data-begin-id", (c) => c.dataBeginId),
	inVocabulary("data-end-id", (c) => c.dataEndId),
	inVocabulary("data-pad-id", (c) => c.dataPadId),
	energon((c) =>
		unless(
			!hasEncoder(c) || c.tokenizer !== null || c.imageTokenId > 255,
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
