/** `mimo elastic rank` on a rank: opens the model, measures its units, and each layer by leaving it out. */
import { withoutCuts } from "../config/hybrid-pattern.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import { SkippedTally } from "../data/skipped-samples.ts";
import type { Importance } from "../guests/elastic/importance/importance.ts";
import { countedRows, countedTokens, ImportanceMeter } from "../guests/elastic/importance/meter.ts";
import { hybridConfig } from "../models/language/from-configuration.ts";
import { warn } from "../observe/messages.ts";
import type { World } from "../parallel/index.ts";
import { Tensor } from "../tensor/index.ts";
import type { Run } from "../train/assemble.ts";
import { evaluate } from "../train/evaluate.ts";
import { SkippedReport } from "../train/report/skipped-samples.ts";
import { openModel } from "./checkpoint-model.ts";
import { reportingRank } from "./generate.ts";
import { entriesOf, samplesOf } from "./losses.ts";

export interface RankingJob {
	readonly data: readonly string[];
	/** Samples of a data set at most. */
	readonly samples: number;
	/** Whether layers are left out one by one, each a pass over all samples. */
	readonly layers: boolean;
}

/** The ranking on the reporting rank, null on the others. Every rank of the world calls this together. */
export async function runRank(c: TrainingConfiguration, job: RankingJob, world: World): Promise<Importance | null> {
	using run = await openModel(c, world, warn);
	const config = hybridConfig(c);
	const meter = new ImportanceMeter(config);
	const changes = new OutputChanges(run, config.pattern.length);
	const tally = new SkippedTally();
	let tokens = 0;
	for await (const { microbatches } of samplesOf(c, run, world, entriesOf(c, job.data), job.samples, tally)) {
		for (const microbatch of microbatches) {
			const counted = countedTokens(microbatch.text);
			if (run.language) run.language.probe = meter.probeOf(run.language, counted);
			tokens += changes.keep(microbatch, counted);
			if (job.layers) changes.measure(microbatch);
		}
	}
	if (run.language) run.language.probe = null;
	const units = meter.finish(world.device, run.state.world);
	const layers = job.layers ? changes.finish() : config.pattern.map(() => null);
	const sentences = new SkippedReport(run.state.world, tally).rest();
	if (run.rank !== reportingRank(run)) return null;
	for (const sentence of sentences) warn(sentence);
	return {
		format: "mimo-elastic-importance",
		version: 1,
		...{ data: [...job.data], tokens, pattern: withoutCuts(c.hybridLayerPattern), embedding: units.embedding },
		layers: units.layers.map((layer, index) => ({ layer: layers[index]!, ...layer })),
	};
}

/** Relative change of the model's output (final norm) without each layer: squared difference over the squared output. */
class OutputChanges {
	/** Of this rank's counted rows: the sum of their squares, and that of the differences without each layer. */
	readonly #sums: Float64Array;
	#kept: Float32Array = new Float32Array();
	#counted: Uint8Array = new Uint8Array();

	constructor(
		private readonly run: Run,
		layers: number,
	) {
		this.#sums = new Float64Array(layers + 1);
	}

	/** Runs a microbatch as it is, and keeps its output. Returns how many tokens of all ranks have a loss. */
	keep(microbatch: ImageTextMicrobatch, counted: Uint8Array): number {
		const { tokens } = evaluate(this.run.state, [microbatch], (name, value) => {
			if (name !== "final_norm") return;
			this.#kept = value.toFloat32();
			this.#counted = countedRows(counted, this.#kept.length / value.width, this.run.language!.parallel.tp.rank);
			this.#sums[0]! += this.#sumOfRows(value.width, (i) => this.#kept[i]! ** 2);
		});
		return tokens;
	}

	/** Runs the microbatch that was kept without each layer. */
	measure(microbatch: ImageTextMicrobatch): void {
		const { language, state } = this.run;
		for (let left = 0; left + 1 < this.#sums.length; left++) {
			if (language) {
				language.probe = {
					branch: (value, { layer }) => {
						if (layer === left) language.device.setZero(value, value.bytes);
					},
					// Projections of experts run apart, as where keep() observes the values between them.
					channels: () => {},
				};
			}
			evaluate(state, [microbatch], (name, value) => {
				if (name !== "final_norm") return;
				const moved = value.toFloat32();
				this.#sums[left + 1]! += this.#sumOfRows(value.width, (i) => (moved[i]! - this.#kept[i]!) ** 2);
			});
		}
	}

	/** Sum over the elements of counted rows. */
	#sumOfRows(width: number, of: (element: number) => number): number {
		let sum = 0;
		for (const [row, counts] of this.#counted.entries()) {
			if (counts === 0) continue;
			for (let i = row * width; i < (row + 1) * width; i++) sum += of(i);
		}
		return sum;
	}

	/** Of every layer, over all ranks, which call this together. */
	finish(): number[] {
		const { world, scalars } = this.run.state;
		const all = this.#sums;
		if (world.size > 1) {
			using total = Tensor.from(scalars.device, all);
			world.allReduce(total).wait();
			scalars.device.copyToHost(all, total);
		}
		return [...all.subarray(1)].map((sum) => sum / all[0]!);
	}
}
