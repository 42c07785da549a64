/** Checks of the keys of Megatron's indexed data. */

import type { Key } from "../schema.ts";
import { propertyOf } from "../schema.ts";
import { type Check, unless } from "./check.ts";

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
