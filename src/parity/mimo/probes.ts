/**
 * Compares values that a mimo-* folder recorded inside step 1, wherever their parts lie: activations and routing
 * weights of every lane's first microbatch, tokens per expert of every microbatch, the expert bias after the step.
 */
import type { HybridModel } from "../../models/language/model.ts";
import type { Device } from "../../native/device.ts";
import { type Group, visionModule } from "../../parallel/index.ts";
import type { Tensor } from "../../tensor/index.ts";
import type { MicrobatchObserver } from "../../train/rank-passes.ts";
import { type Check, relative } from "../comparison.ts";
import { ProbeSums, reduceHost } from "../probe-sums.ts";
import { encoderSamples, languageSamples, type Plan } from "../verify/samples.ts";
import type { MimoBatches } from "./batches.ts";
import type { MimoGolden, MimoGoldenConfig, MimoProbe } from "./golden.ts";
import { hasImage, languageLayerName, probeNames, routersOf } from "./golden-checks.ts";

/** The parts of a run on this rank. */
export interface RankView {
	readonly plan: Plan;
	/** Every rank of the run. */
	readonly world: Group;
	readonly device: Device;
	/** null on a rank of the encoder alone. */
	readonly language: { readonly model: HybridModel; readonly lane: number } | null;
	/** null on a rank of the language model alone. */
	readonly encoder: { readonly tp: Group; readonly lane: number } | null;
}

interface Place {
	/** Among all samples of the step, lane after lane of the reference. */
	readonly sample: number;
	/** Row of the sample's own tensor. */
	readonly row: number;
}

const expertBiasLimit = 1e-9;

/** Every rank of the run makes one for step 1, observes with it, and calls `checks` together with all others. */
export class MimoProbes {
	readonly #probes: ProbeSums;
	/** Index of a probe by lane and upstream's name. */
	readonly #index = new Map<string, number>();
	/** [routers, samples, experts] of this rank's tokens. */
	readonly #tokens: Float64Array;
	readonly #samples: readonly number[];

	constructor(
		readonly config: MimoGoldenConfig,
		readonly golden: MimoGolden,
		readonly batches: MimoBatches,
		readonly rank: RankView,
	) {
		const { lanes, microbatches_per_lane: perLane } = config.data;
		const { step1_probe: recorded } = golden;
		this.#samples = Array.from({ length: lanes * perLane }, (_, sample) => sample);
		const probes = recorded.lanes.flatMap((of, lane) => [
			...probeNames(config, hasImage(config, 0, lane, 0)).map((name) => ({ lane, name, probe: of[name] as MimoProbe })),
			{ lane, name: "logits", probe: recorded.logits_lanes[lane]! },
		]);
		for (const [index, { lane, name }] of probes.entries()) this.#index.set(`${lane} ${name}`, index);
		this.#probes = new ProbeSums(
			probes.map(({ lane, name, probe: { shape, ...values } }) => ({
				...values,
				name: `step 1 ${name}${lanes > 1 ? ` lane ${lane}` : ""}`,
				elements: shape.reduce((product, size) => product * size, 1),
			})),
		);
		const { num_experts: experts } = config.language_model.moe;
		this.#tokens = new Float64Array(routersOf(config).length * this.#samples.length * experts);
		this.#watchRouters();
	}

	/** Adds this rank's part of a value of step 1. */
	readonly observe: MicrobatchObserver = (name, value, microbatch) => {
		const prefix = `${visionModule}.`;
		const encoder = name.startsWith(prefix) ? name.slice(prefix.length) : null;
		if (encoder !== null) this.#addEncoder(encoder, value, microbatch);
		else this.#addLanguage(name, value, microbatch);
	};

	/** Called after step 1's update: the verdict on the sums of all ranks. */
	checks(): Check[] {
		const { world, device } = this.rank;
		for (const router of this.rank.language?.model.routers.values() ?? []) router.onRouting = null;
		reduceHost(world, device, this.#tokens);
		return [...this.#probes.checks(world, device), ...this.#tokenChecks(), ...this.#biasChecks()];
	}

	/** Adds rows of a value. `placeOf`: sample of a row, or null if another rank adds the row. */
	#add(
		name: string,
		{ values, width }: { readonly values: Float32Array; readonly width: number },
		columns: { readonly first: number; readonly live: number; readonly all: number },
		placeOf: (row: number) => Place | null,
	): void {
		const perLane = this.config.data.microbatches_per_lane;
		for (let row = 0; row * width < values.length; row++) {
			const place = placeOf(row);
			if (place === null || place.sample % perLane !== 0) continue;
			const index = this.#index.get(`${place.sample / perLane} ${name}`);
			if (index === undefined) throw new Error(`golden.json is not asked for the probe ${name}.`);
			const own = values.subarray(row * width, row * width + columns.live);
			this.#probes.add(index, own, place.row * columns.all + columns.first);
		}
	}

	/** Tensor-parallel ranks of the encoder have the same values. */
	#addEncoder(name: string, value: Tensor, microbatch: number): void {
		const { plan, encoder } = this.rank;
		if (encoder!.tp.rank !== 0) return;
		const perLane = this.config.data.microbatches_per_lane;
		const withImages = encoderSamples(
			plan,
			this.#samples,
			plan.topology.featureEdges[0]!,
			encoder!.lane,
			microbatch,
		).filter((sample) => hasImage(this.config, 0, Math.floor(sample / perLane), sample % perLane));
		const rows = value.rows / withImages.length;
		const layer = /^layer\.(\d+)$/.exec(name)?.[1];
		const upstream = layer !== undefined ? `layer${layer}` : name === "projector" ? "projector0" : name;
		this.#add(`vit.${upstream}`, { values: value.toFloat32(), width: value.width }, wholeRows(value.width), (row) => ({
			sample: withImages[Math.floor(row / rows)]!,
			row: row % rows,
		}));
	}

	#addLanguage(name: string, value: Tensor, microbatch: number): void {
		const { model } = this.rank.language!;
		const { tp, cp, tokens } = model.parallel;
		const values = value.toFloat32();
		if (name === "logits") {
			const { start, live } = model.vocabularyShard;
			const columns = { first: start, live, all: this.config.language_model.vocab_size };
			this.#add("logits", { values, width: value.width }, columns, this.#tokenPlaces(microbatch, cp.rank * value.rows));
			return;
		}
		if (name === "per_token_loss") {
			const places = this.#tokenPlaces(microbatch, cp.rank * value.elements);
			if (tp.rank === 0) this.#add("lm.per_token_loss", { values, width: 1 }, wholeRows(1), places);
			return;
		}
		const places = this.#tokenPlaces(microbatch, tokens.rank * value.rows);
		const layer = /^layer\.(\d+)$/.exec(name)?.[1];
		const known: Readonly<Record<string, string>> = {
			text_embedding: "lm.embedding",
			embedding: "lm.decoder_input",
			final_norm: "lm.final_norm",
		};
		const upstream = layer === undefined ? known[name]! : languageLayerName(this.config, Number(layer));
		const placeOf = name === "text_embedding" ? this.#textPlaces(places) : places;
		this.#add(upstream, { values, width: value.width }, wholeRows(value.width), placeOf);
	}

	/** Places of tokens of a language microbatch; this rank's first token is token `first` of the microbatch. */
	#tokenPlaces(microbatch: number, first: number): (row: number) => Place {
		const { plan, language } = this.rank;
		const { sequence_length: length } = this.config.language_model;
		const samples = languageSamples(plan, this.#samples, language!.lane, microbatch);
		return (row) => ({ sample: samples[Math.floor((first + row) / length)]!, row: (first + row) % length });
	}

	/** Upstream embeds text tokens only: image tokens have no place, and later text tokens move up. */
	#textPlaces(placeOf: (row: number) => Place): (row: number) => Place | null {
		const perLane = this.config.data.microbatches_per_lane;
		const { image_token_id: imageToken } = this.config.language_model;
		const placesOfSample = new Map<number, Int32Array>();
		return (at) => {
			const { sample, row } = placeOf(at);
			let places = placesOfSample.get(sample);
			if (places === undefined) {
				const { ids } = this.batches.microbatch(0, Math.floor(sample / perLane), sample % perLane).text;
				let text = 0;
				places = Int32Array.from(ids, (id) => (id === imageToken ? -1 : text++));
				placesOfSample.set(sample, places);
			}
			return places[row]! < 0 ? null : { sample, row: places[row]! };
		};
	}

	#watchRouters(): void {
		const { language } = this.rank;
		const { num_experts: experts, router_topk: topk } = this.config.language_model.moe;
		for (const [at, { layer, name }] of routersOf(this.config).entries()) {
			const router = language?.model.routers.get(layer);
			if (!router) continue;
			let microbatch = 0;
			router.onRouting = (expertIndex, _logits, probabilities) => {
				const chosen = expertIndex.toInt32();
				const weights = probabilities.toFloat32();
				const tokens = chosen.length / topk;
				const places = this.#tokenPlaces(microbatch++, language!.model.parallel.tokens.rank * tokens);
				const dense = new Float32Array(tokens * experts);
				for (const [slot, expert] of chosen.entries()) {
					const token = Math.floor(slot / topk);
					dense[token * experts + expert] = weights[slot]!;
					this.#tokens[(at * this.#samples.length + places(token).sample) * experts + expert]!++;
				}
				this.#add(`${name}.probs`, { values: dense, width: experts }, wholeRows(experts), places);
			};
		}
	}

	#tokenChecks(): Check[] {
		const { microbatches_per_lane: perLane } = this.config.data;
		const { num_experts: experts } = this.config.language_model.moe;
		return routersOf(this.config).flatMap(({ layer, name }, at) =>
			this.#samples.flatMap((sample) => {
				const [lane, microbatch] = [Math.floor(sample / perLane), sample % perLane];
				const begin = (at * this.#samples.length + sample) * experts;
				return this.golden.step1_probe.tokens_per_expert[name]![lane]![microbatch]!.map((expected, expert) => {
					const actual = this.#tokens[begin + expert]!;
					return {
						name: `step 1 tokens of expert ${expert}, layer ${layer}, lane ${lane} microbatch ${microbatch}`,
						...{ expected, actual, error: relative(actual, expected), limit: 0 },
					};
				});
			}),
		);
	}

	/** Ranks of the language model hold equal biases: the furthest off counts. */
	#biasChecks(): Check[] {
		const { world, device, language } = this.rank;
		return routersOf(this.config).flatMap(({ layer, name }) => {
			const wanted = this.golden.step1_probe.expert_bias_after_step1[`${name}.expert_bias`] ?? [];
			const own = language?.model.routers.get(layer)?.expertBias.toFloat32();
			const off = Float64Array.from(wanted, (expected, expert) => Math.abs((own?.[expert] ?? expected) - expected));
			reduceHost(world, device, off, "max");
			return wanted.map((expected, expert) => ({
				name: `step 1 expert bias ${layer} ${expert}`,
				...{ expected, actual: own?.[expert] ?? expected, error: off[expert]!, limit: expertBiasLimit },
			}));
		});
	}
}

function wholeRows(width: number) {
	return { first: 0, live: width, all: width };
}
