/** Names and shapes of a projector's tensors: Megatron's logical ones and those of Hugging Face folders (docs/spec/vision.md §3). */
import type { CorrespondenceBuilder } from "../mapping.ts";
import { addGated, addInterleaved, biasOf } from "./vision-names.ts";

type Shapes = ReadonlyMap<string, { readonly shape: readonly number[] }>;

export const projectorPrefix = "modality_submodules.radio_encoder.input_projections.0.encoder.";

/** The projector of published models: a norm, two projections. */
const logical = ["linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight"] as const;

/** Their names in folders, by style; biases end with "bias" instead. */
export const projectorStyles = {
	/** Published models; mlp1.2 is the activation. */
	published: ["mlp1.0.weight", "mlp1.1.weight", "mlp1.3.weight"],
	/** transformers, of Nemotron's in memory. */
	transformers: [
		"multi_modal_projector.layer_norm.weight",
		"multi_modal_projector.linear_1.weight",
		"multi_modal_projector.linear_2.weight",
	],
	/** LLaVA's and InternVL's in memory. */
	modules: [
		"model.multi_modal_projector.layer_norm.weight",
		"model.multi_modal_projector.linear_1.weight",
		"model.multi_modal_projector.linear_2.weight",
	],
	/** Qwen3-VL and Qwen3.5, whose norm is the tower's. */
	qwen: ["", "model.visual.merger.linear_fc1.weight", "model.visual.merger.linear_fc2.weight"],
	/** Qwen2.5-VL, whose norm is the tower's. */
	qwen25: ["", "visual.merger.mlp.0.weight", "visual.merger.mlp.2.weight"],
	/** The same in memory. */
	qwen25Modules: ["", "model.visual.merger.mlp.0.weight", "model.visual.merger.mlp.2.weight"],
	/** GLM-4.5V, whose MLP is gated. */
	glm: ["", "model.visual.merger.gate_proj.weight", "model.visual.merger.down_proj.weight"],
	/** Megatron's and this program's own, for a projector in a file of its own. */
	logical: logical.map((name) => projectorPrefix + name) as unknown as readonly [string, string, string],
} as const satisfies Record<string, readonly [norm: string, first: string, second: string]>;

/** The learned row behind pictures, which LLaVA-OneVision has. */
const newline = "image_newline";
const newlineName = (style: ProjectorStyle) =>
	style === "logical" ? projectorPrefix + newline : style === "modules" ? `model.${newline}` : newline;

/** Whether it is among these tensors. */
export function hasNewline(stored: Shapes): boolean {
	return (["logical", "transformers", "modules"] as const).some((style) => stored.has(newlineName(style)));
}

/** Names of Qwen's projector of tap `index`. */
function deepNames(index: number): string[] {
	return ["norm", "linear_fc1", "linear_fc2"].map(
		(name) => `model.visual.deepstack_merger_list.${index}.${name}.weight`,
	);
}

/** Names of the linear layers and the norm before the MLP, this program's and GLM-4.5V's. */
const stem = {
	logical: ["stem.linear_in.weight", "stem.linear_proj.weight", "stem.layer_norm_weight"],
	glm: ["downsample.weight", "merger.proj.weight", "merger.post_projection_norm.weight"],
} as const;
export const stemNames = (style: ProjectorStyle): readonly [entry: string, projection: string, norm: string] => {
	const [prefix, names] = style === "glm" ? ["model.visual.", stem.glm] : [projectorPrefix, stem.logical];
	return [`${prefix}${names[0]}`, `${prefix}${names[1]}`, `${prefix}${names[2]}`];
};

/** Projectors of taps among these tensors. */
export function countDeepProjectors(stored: Shapes): number {
	let count = 0;
	while (stored.has(deepNames(count)[1]!) || stored.has(`${projectorPrefix}deepstack.${count}.${logical[1]}`)) count++;
	return count;
}

export type ProjectorStyle = keyof typeof projectorStyles;

/** The one projection of an affine projector, which published models do not have. */
export const affineName = `${projectorPrefix}weight`;

/** The projector of a model or a file, under the program's keys. */
export interface ProjectorSizes {
	readonly visionProjectionType: "affine" | "mlp";
	readonly visionProjectionNorm: boolean;
	/** mlp: absent: RMSNorm, squared-relu, no biases. */
	readonly visionProjectionNormalization?: "RMSNorm" | "LayerNorm";
	readonly visionProjectionActivation?: "squared-relu" | "gelu" | "swiglu";
	/** Whether linear layers and a norm stand before it; absent: they do not. */
	readonly visionProjectionStem?: boolean;
	readonly visionProjectionBias?: boolean;
	/** Whether a learned row stands behind pictures; absent: none does. */
	readonly visionImageNewline?: boolean;
	/** Further projectors of layers of the tower (DeepStack); absent: none. */
	readonly deepstack?: number;
	/** Width of the rows it reads. */
	readonly input: number;
	/** mlp: its hidden width. */
	readonly visionProjectionFfnHiddenSize: number;
	/** Width of the rows it gives. */
	readonly output: number;
}

/** The spelling of the projector's names among these tensors; null: they have no projector. */
export function detectProjector(stored: Shapes): ProjectorStyle | null {
	if (stored.has(affineName)) return "logical";
	const styles = Object.entries(projectorStyles) as [ProjectorStyle, readonly string[]][];
	return styles.find(([, names]) => names.some((name) => stored.has(name)))?.[0] ?? null;
}

/** Links every tensor of a projector. */
export function addProjector(builder: CorrespondenceBuilder, sizes: ProjectorSizes, style: ProjectorStyle): void {
	const { input, output, visionProjectionFfnHiddenSize: hidden } = sizes;
	if (sizes.visionProjectionType === "affine") {
		builder.same(affineName, affineName, [output, input]);
		return;
	}
	const gated = sizes.visionProjectionActivation === "swiglu";
	const width = sizes.visionProjectionStem ? output : input;
	const shapes = [[input], [(gated ? 2 : 1) * hidden, width], [output, hidden]] as const;
	const add = (
		prefix: string,
		names: readonly string[],
		norm: ProjectorSizes["visionProjectionNormalization"] | null,
	) => {
		for (const [index, shape] of shapes.entries()) {
			if (index === 0 && norm === null) continue;
			const [mine, theirs] = [prefix + logical[index]!, names[index]!];
			const biased = index === 0 ? norm === "LayerNorm" : sizes.visionProjectionBias === true;
			if (index === 1 && style === "glm") {
				const halves = ["gate_proj", "up_proj"].map((name) => `model.visual.merger.${name}`);
				addGated(builder, mine.replace(/\.weight$/, ""), halves, { rows: hidden, columns: width, biased });
				continue;
			}
			builder.same(mine, theirs, shape);
			if (biased) builder.same(biasOf(mine), biasOf(theirs), [shape[0]]);
		}
	};
	const { visionProjectionNorm: normed, visionProjectionNormalization: norm } = sizes;
	add(projectorPrefix, projectorStyles[style], normed ? norm : null);
	if (sizes.visionProjectionStem) addStem(builder, sizes, style);
	if (sizes.visionImageNewline) builder.same(newlineName("logical"), newlineName(style), [output]);
	for (let tap = 0; tap < (sizes.deepstack ?? 0); tap++) {
		const prefix = `${projectorPrefix}deepstack.${tap}.`;
		const theirs = style === "logical" ? logical.map((name) => prefix + name) : deepNames(tap);
		add(prefix, theirs, "LayerNorm");
	}
}

function addStem(builder: CorrespondenceBuilder, { input, output }: ProjectorSizes, style: ProjectorStyle): void {
	const [mine, theirs] = [stemNames("logical"), stemNames(style)];
	const names = { logical: mine[0], foreign: theirs[0] };
	if (style !== "glm") builder.same(mine[0], theirs[0], [output, input]);
	// GLM convolves blocks of 2 × 2 patches, whose values are neighbours in its kernel.
	else addInterleaved(builder, names, { rows: output, parts: 4, length: input / 4, shape: [output, input / 4, 2, 2] });
	builder.same(biasOf(mine[0]), biasOf(theirs[0]), [output]);
	builder.same(mine[1], theirs[1], [output, output]);
	builder.same(mine[2], theirs[2], [output]);
	builder.same(biasOf(mine[2]), biasOf(theirs[2]), [output]);
}
