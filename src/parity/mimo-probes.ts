/** What a mimo-* folder recorded inside step 1: activations of every lane's first microbatch, routing, expert bias. */
import type { HybridModel } from "../models/hybrid/model.ts";
import { layerPrefix } from "../models/hybrid/names.ts";
import { UserError } from "../native/errors.ts";
import type { Tensor } from "../tensor/tensor.ts";
import type { MicrobatchObserver } from "../train/schedule.ts";
import { type Check, relative } from "./comparison.ts";
import type { MimoGolden, MimoGoldenConfig, MimoProbe } from "./mimo-golden.ts";

/** Largest difference of a probed value, in units of the tensor's rms. */
const probeLimit = 2e-5;

/** Layers by their class upstream. */
const layerClasses = { M: "MambaLayer", "*": "TransformerLayer", E: "MoETransformerLayer", "-": "MLPLayer" } as const;

export class MimoProbes {
	/** Tokens per expert counted up to the previous microbatch, by layer. */
	readonly #counted = new Map<number, Int32Array>();

	constructor(
		readonly config: MimoGoldenConfig,
		readonly golden: MimoGolden,
		readonly language: HybridModel,
		readonly checks: Check[],
	) {}

	/** Compares values of step 1 as they arise; microbatches are those of lane 0, then of lane 1, … */
	readonly observe: MicrobatchObserver = (name, value, microbatch) => {
		const perLane = this.config.data.microbatches_per_lane;
		const [lane, index] = [Math.floor(microbatch / perLane), microbatch % perLane];
		if (name === "logits") this.#compareRouting(lane, index);
		if (index !== 0) return;
		if (name === "logits") {
			using live = value.columns(0, this.config.language_model.vocab_size);
			this.#compare(lane, "logits", live, this.golden.step1_probe.logits_lanes[lane]);
			return;
		}
		const upstream = this.#upstreamName(name);
		const expected = this.golden.step1_probe.lanes[lane]?.[upstream];
		if (!expected || !("rms" in expected)) throw new UserError(`golden.json has no probe ${upstream}.`);
		this.#compare(lane, upstream, value, expected as MimoProbe);
	};

	/** After step 1's update. */
	compareExpertBias(): void {
		for (const [layer, router] of this.language.routers) {
			const name = `${layerPrefix(layer)}mlp.router.expert_bias`;
			const expected = this.golden.step1_probe.expert_bias_after_step1[name];
			if (!expected) throw new UserError(`golden.json has no expert bias ${name}.`);
			for (const [expert, actual] of router.expertBias.toFloat32().entries()) {
				const wanted = expected[expert]!;
				const error = Math.abs(actual - wanted);
				this.checks.push({
					name: `step 1 expert bias ${layer} ${expert}`,
					expected: wanted,
					actual,
					error,
					limit: 1e-9,
				});
			}
		}
	}

	#upstreamName(name: string): string {
		const layer = /^(encoder\.)?layer\.(\d+)$/.exec(name);
		if (layer) {
			const index = Number(layer[2]);
			if (layer[1]) return `vit.layer${index}`;
			return `lm.layer${index}.${layerClasses[this.config.language_model.pattern[index]!]}`;
		}
		const known: Record<string, string> = {
			"encoder.projector": "vit.projector0",
			embedding: "lm.decoder_input",
			final_norm: "lm.final_norm",
			per_token_loss: "lm.per_token_loss",
		};
		return known[name] ?? name.replace(/^encoder\./, "vit.");
	}

	/** rms, largest magnitude and first values: the worst difference in units of the reference's rms. */
	#compare(lane: number, name: string, value: Tensor, expected: MimoProbe | undefined): void {
		if (!expected) throw new UserError(`golden.json has no probe ${name} of lane ${lane}.`);
		const values = value.toFloat32();
		const elements = expected.shape.reduce((product, size) => product * size, 1);
		if (values.length !== elements) {
			throw new UserError(`${name} has ${values.length} values; golden.json says [${expected.shape}].`);
		}
		const compared = [
			[Math.sqrt(values.reduce((sum, x) => sum + x * x, 0) / values.length), expected.rms],
			[values.reduce((most, x) => Math.max(most, Math.abs(x)), 0), expected.absmax],
			...expected.head.map((wanted, i) => [values[i]!, wanted]),
		] as [number, number][];
		const error = ([actual, wanted]: readonly [number, number]) => Math.abs(actual - wanted) / expected.rms;
		// NaN is the worst there is.
		const worst = compared.reduce((a, b) => (Number.isNaN(error(a)) || error(b) <= error(a) ? a : b));
		this.checks.push({
			name: `step 1 ${name}${this.golden.step1_probe.lanes.length > 1 ? ` lane ${lane}` : ""}`,
			expected: worst[1],
			actual: worst[0],
			error: error(worst),
			limit: probeLimit,
		});
	}

	/** Tokens every expert got of this microbatch. */
	#compareRouting(lane: number, microbatch: number): void {
		for (const [layer, { tokensPerExpert }] of this.language.routers) {
			const now = tokensPerExpert.toInt32();
			const before = this.#counted.get(layer);
			this.#counted.set(layer, now);
			const name = `${layerPrefix(layer)}mlp.router`;
			const expected = this.golden.step1_probe.tokens_per_expert[name]?.[lane]?.[microbatch];
			if (!expected) throw new UserError(`golden.json has no tokens per expert of ${name}.`);
			for (const [expert, wanted] of expected.entries()) {
				const actual = now[expert]! - (before?.[expert] ?? 0);
				this.checks.push({
					name: `step 1 tokens of expert ${expert}, layer ${layer}, lane ${lane} microbatch ${microbatch}`,
					expected: wanted,
					actual,
					error: relative(actual, wanted),
					limit: 0,
				});
			}
		}
	}
}
