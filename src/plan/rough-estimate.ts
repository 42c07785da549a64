/**
 * A rough estimate of a layout's memory and step time from sizes alone. It only decides which layouts `mimo plan --split` plans
 * exactly when there are too many to plan all; no printed number comes from it.
 */

import { parsePattern } from "../config/hybrid-pattern.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { mockImage } from "../data/mock.ts";
import { countFlopsPerToken } from "../models/language/counts.ts";
import { hybridConfig } from "../models/language/from-configuration.ts";
import { kinds } from "../models/language/kinds/index.ts";
import { hybridParameters } from "../models/language/names.ts";
import { imageCost } from "../models/radio/counts.ts";
import { elementCount } from "../tensor/index.ts";
import { encodersOf } from "../train/from-configuration.ts";
import type { UncheckedLayout } from "./layout-candidates.ts";
import type { Machine } from "./run-plan.ts";

export interface RoughEstimate {
	/** Bytes of parameters, gradients and optimizer on a rank of the language model. */
	readonly states: number;
	/** Seconds of a step. */
	readonly seconds: number;
}

/** Bytes of a parameter in bf16 with its fp32 gradient, and of its master and moments, which replicas may share. */
const [resident, optimizer] = [6, 12];

/** Estimates layouts of one configuration. */
export function roughEstimateOf(
	c: TrainingConfiguration,
	{ rates, ranksPerHost }: Machine,
): (layout: UncheckedLayout) => RoughEstimate {
	const specs = hybridParameters(hybridConfig(c));
	const elements = (experts: boolean) =>
		specs
			.filter((spec) => (spec.experts ?? 1) > 1 === experts)
			.reduce((sum, { shape, experts: copies }) => sum + elementCount(shape) * (copies ?? 1), 0);
	const [dense, expertElements] = [elements(false), elements(true)];
	const { forwardBackward } = countFlopsPerToken(c);
	const { grid, tokens: imageTokens } = mockImage(c);
	const [vision] = encodersOf(c);
	const images = vision ? imageCost(vision.parts, grid, vision.frozen.tower) : 0;
	const tokens = c.microBatchSize * c.seqLength;
	const lanes = c.globalBatchSize / c.microBatchSize;
	const layers = parsePattern(c.hybridLayerPattern).segments.flat(2);
	const expertLayers = layers.filter((kind) => kinds[kind].routes).length;
	const speed = (ranks: number) => (ranks > ranksPerHost ? rates.between : rates.inside).bytes;
	return ({ kind, encoder, language }) => {
		const { tensor, data, expert } = language;
		const { stages, virtualStages } = kind;
		const microbatches = lanes / data;
		const own = { dense: dense / (tensor * stages), expert: expertElements / (expert * stages) };
		const shared = c.useDistributedOptimizer;
		const copies = { dense: shared ? data : 1, expert: shared ? (tensor * data) / expert : 1 };
		const states =
			own.dense * (resident + optimizer / copies.dense) + own.expert * (resident + optimizer / copies.expert);
		const row = 2 * c.hiddenSize;
		const tensorBytes = tensor > 1 ? 4 * layers.length * tokens * row * (1 - 1 / tensor) : 0;
		const rows = (tokens / tensor) * c.moeRouterTopk;
		const expertBytes = 4 * expertLayers * rows * row * (1 - 1 / expert);
		const pass =
			((tokens * forwardBackward) / tensor / rates.product +
				tensorBytes / speed(tensor) +
				expertBytes / speed(Math.max(tensor, expert))) /
			stages;
		const gradients = (6 * (own.dense + own.expert)) / speed(tensor * data);
		const languageSeconds = (microbatches + (stages - 1) / virtualStages) * pass + gradients;
		const apart = kind.modules === "disjoint";
		// Of an encoder's tensor-parallel ranks one sends the rows.
		const edge = apart ? (imageTokens * row * encoder.tensor) / rates.between.bytes : 0;
		const encoderSeconds =
			encoder.ranks > 0 ? (c.globalBatchSize * (images / rates.product + edge)) / encoder.ranks : 0;
		// Breaks ties between layouts with an equally slow slower module by the faster module.
		const [more, less] = [Math.max(languageSeconds, encoderSeconds), Math.min(languageSeconds, encoderSeconds)];
		return { states, seconds: apart ? more + less / 16 : more + less };
	};
}
