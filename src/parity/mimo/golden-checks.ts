/**
 * Whether golden.json of a mimo-* folder has everything that its config.json says was recorded, and says it once: a value
 * that is missing, or that contradicts another, is an error before a step is trained.
 */
import type { LayerKind } from "../../config/hybrid-pattern.ts";
import { layerPrefix } from "../../models/language/layer-numbering.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { requireBands } from "../comparison.ts";
import { requireKeys } from "../golden-fields.ts";
import type { MimoGolden, MimoGoldenConfig } from "./golden.ts";

/** Layers by their class upstream. */
const layerClasses: Readonly<Partial<Record<LayerKind, string>>> = {
	mamba: "MambaLayer",
	attention: "TransformerLayer",
	moe: "MoETransformerLayer",
	mlp: "MLPLayer",
};

const indices = (count: number) => Array.from({ length: count }, (_, index) => index);

/** Layers with a router, and Megatron's name of it. */
export function routersOf({
	language_model: l,
}: MimoGoldenConfig): { readonly layer: number; readonly name: string }[] {
	return indices(l.pattern.length)
		.filter((layer) => l.pattern[layer] === "moe")
		.map((layer) => ({ layer, name: `${layerPrefix(layer)}mlp.router` }));
}

/** Upstream's name of a layer of the language model. */
export function languageLayerName({ language_model: l }: MimoGoldenConfig, layer: number): string {
	return `lm.layer${layer}.${layerClasses[l.pattern[layer]!]}`;
}

/** Probes of a lane's first microbatch, in the order they arise. `image`: its sample has one. */
export function probeNames(config: MimoGoldenConfig, image: boolean): string[] {
	const layers = indices(config.vision.num_layers).map((layer) => `vit.layer${layer}`);
	const routers = routersOf(config);
	return [
		...(image
			? ["vit.embedder", "vit.decoder_input", ...layers, "vit.radio_out", "vit.encoder_out", "vit.projector0"]
			: []),
		...["lm.embedding", "lm.decoder_input"],
		...indices(config.language_model.pattern.length).flatMap((layer) => [
			...routers.filter((router) => router.layer === layer).map(({ name }) => `${name}.probs`),
			languageLayerName(config, layer),
		]),
		...["lm.final_norm", "lm.per_token_loss"],
	];
}

/** Whether a sample has an image; step, lane and microbatch from 0. */
export function hasImage({ data }: MimoGoldenConfig, step: number, lane: number, microbatch: number): boolean {
	const samples = data.text_only?.samples ?? [];
	return !samples.some(([s, l, m]) => s === step + 1 && l === lane && m === microbatch + 1);
}

/** Encoder ranks of the reference that had an image in any microbatch of a step: each served a run of the lanes. */
export function participantsOf(config: MimoGoldenConfig, step: number): number {
	const { lanes, microbatches_per_lane: perLane } = config.data;
	const ranks = config.layout.encoder.data_parallel;
	const rankOf = (lane: number) => Math.floor((lane * ranks) / lanes);
	const withImages = indices(lanes).filter((lane) => indices(perLane).some((m) => hasImage(config, step, lane, m)));
	return new Set(withImages.map(rankOf)).size;
}

/** Throws a UserError that names the file and the field. */
export function checkMimoGolden(folder: string, config: MimoGoldenConfig, golden: MimoGolden): void {
	if (golden.steps.length !== config.data.steps) {
		throw new UserError(
			`${folder}: golden.json has ${counted(golden.steps.length, "step")}, config.json ${config.data.steps}.`,
		);
	}
	const path = `${folder}/golden.json`;
	requireBands(path, golden.exact_steps, golden.steps);
	checkSteps(path, config, golden);
	checkLanes(path, config, golden);
	checkRouting(path, config, golden);
}

function checkSteps(path: string, config: MimoGoldenConfig, { steps }: MimoGolden): void {
	const routers = routersOf(config).map(({ layer }) => String(layer));
	const balanced = config.language_model.moe.load_balancing_type === "seq_aux_loss" && routers.length > 0;
	const { participants, text_only: textOnly } = config.data;
	for (const [index, step] of steps.entries()) {
		const where = `${path}: step ${index + 1}`;
		if (step.lr !== config.optimizer.lr) {
			throw new UserError(`${where} has lr ${step.lr}; config.json has the constant ${config.optimizer.lr}.`);
		}
		const layers = Object.keys(step.seq_load_balancing_loss_layers ?? {});
		if (balanced && (step.seq_load_balancing_loss === undefined || String(layers) !== String(routers))) {
			throw new UserError(
				`${where} needs seq_load_balancing_loss, and seq_load_balancing_loss_layers of layers ${routers.join(", ")}.`,
			);
		}
		const ranks = participantsOf(config, index);
		const given = [...(textOnly ? [step.participants, participants?.[index]] : [])];
		if (given.some((count) => count !== ranks)) {
			throw new UserError(
				`${where} has participants ${step.participants} and config.json ${participants?.[index]}; its samples have images on ${counted(ranks, "encoder rank")}.`,
			);
		}
	}
}

function checkLanes(path: string, config: MimoGoldenConfig, { step1_probe: probes }: MimoGolden): void {
	const { lanes } = config.data;
	if (probes.lanes.length !== lanes || probes.logits_lanes.length !== lanes) {
		throw new UserError(
			`${path}: step1_probe needs lanes and logits_lanes of ${counted(lanes, "lane")}, as config.json has.`,
		);
	}
	const maps = routersOf(config).map(({ name }) => `${name}.map`);
	for (const [lane, found] of probes.lanes.entries()) {
		const wanted = [...probeNames(config, hasImage(config, 0, lane, 0)), ...maps];
		const missing = wanted.find((name) => !(name in found));
		const unknown = Object.keys(found).find((name) => !wanted.includes(name));
		if (missing !== undefined) throw new UserError(`${path} has no probe ${missing} of lane ${lane}.`);
		if (unknown !== undefined)
			throw new UserError(`${path}: lane ${lane} has a probe ${unknown} that nothing computes.`);
		const numbers = wanted.find((name) => "rms" in found[name]! === name.endsWith(".map"));
		if (numbers !== undefined) throw new UserError(`${path}: the probe ${numbers} of lane ${lane} has other fields.`);
	}
	const names = indices(config.language_model.pattern.length).map((layer) => languageLayerName(config, layer));
	const first = names.map((name) => probes.lanes[0]![name]);
	const wanted = { layer_names: names, layers: first, logits: probes.logits_lanes[0] };
	const again = Object.fromEntries(Object.keys(wanted).map((key) => [key, probes[key as keyof typeof wanted]]));
	const recorded = Object.values(again).some((value) => value !== undefined);
	if (recorded && !Bun.deepEquals(again, wanted)) {
		throw new UserError(`${path}: layer_names, layers and logits of step1_probe are not those of its lane 0.`);
	}
}

function checkRouting(path: string, config: MimoGoldenConfig, { step1_probe: probes }: MimoGolden): void {
	const { lanes, microbatches_per_lane: perLane } = config.data;
	const { num_experts: experts, router_enable_expert_bias: biased } = config.language_model.moe;
	const routers = routersOf(config);
	requireKeys(
		`${path}: tokens_per_expert`,
		probes.tokens_per_expert,
		routers.map(({ name }) => name),
	);
	requireKeys(
		`${path}: expert_bias_after_step1`,
		probes.expert_bias_after_step1,
		biased ? routers.map(({ name }) => `${name}.expert_bias`) : [],
	);
	for (const [name, bias] of Object.entries(probes.expert_bias_after_step1)) {
		if (bias.length !== experts) throw new UserError(`${path}: ${name} has ${bias.length} experts of ${experts}.`);
	}
	for (const [name, counts] of Object.entries(probes.tokens_per_expert)) {
		const shape = [counts.length, ...new Set(counts.map((lane) => lane.length))];
		const widths = new Set(counts.flat().map((row) => row.length));
		if (String([...shape, ...widths]) !== String([lanes, perLane, experts])) {
			throw new UserError(`${path}: tokens_per_expert of ${name} is not [${lanes}, ${perLane}, ${experts}].`);
		}
		for (const [lane, microbatches] of counts.entries()) {
			const map = probes.lanes[lane]![`${name}.map`] as { readonly tokens_per_expert: readonly number[] };
			if (String(map.tokens_per_expert) !== String(microbatches[0])) {
				throw new UserError(`${path}: ${name}.map of lane ${lane} is not tokens_per_expert of its microbatch 1.`);
			}
		}
	}
}

/** Whether each sample of a step has an image, lane after lane. */
export function samplesWithImages(config: MimoGoldenConfig, step: number): boolean[] {
	const { lanes, microbatches_per_lane: perLane } = config.data;
	return Array.from({ length: lanes * perLane }, (_, sample) =>
		hasImage(config, step, Math.floor(sample / perLane), sample % perLane),
	);
}
