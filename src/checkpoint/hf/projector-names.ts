/** Names and shapes of the projector between tower and language model (docs/spec/vision.md §3, §1.9). A pure plan. */
import type { CorrespondenceBuilder } from "../mapping.ts";

export const projectorPrefix = "modality_submodules.radio_encoder.input_projections.0.encoder.";

/** The projector of published models: an RMS norm, two projections. */
const logical = ["linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight"] as const;

/** Their names in folders, by style. */
export const projectorStyles = {
	/** Published models; mlp1.2 is the activation. */
	published: ["mlp1.0.weight", "mlp1.1.weight", "mlp1.3.weight"],
	/** transformers in memory. */
	transformers: [
		"multi_modal_projector.layer_norm.weight",
		"multi_modal_projector.linear_1.weight",
		"multi_modal_projector.linear_2.weight",
	],
	/** Megatron's and this program's own, for a projector in a file of its own. */
	logical: logical.map((name) => projectorPrefix + name) as unknown as readonly [string, string, string],
} as const satisfies Record<string, readonly [norm: string, first: string, second: string]>;

export type ProjectorStyle = keyof typeof projectorStyles;

/** The one projection of an affine projector, which published models do not have. */
export const affineName = `${projectorPrefix}weight`;

/** The projector of a model or a file, under the program's keys. */
export interface ProjectorSizes {
	readonly visionProjectionType: "affine" | "mlp";
	readonly visionProjectionNorm: boolean;
	/** Width of the rows it reads. */
	readonly input: number;
	/** mlp: its hidden width. */
	readonly visionProjectionFfnHiddenSize: number;
	/** Width of the rows it gives. */
	readonly output: number;
}

type Shapes = ReadonlyMap<string, { readonly shape: readonly number[] }>;

/** The spelling of the projector among these tensors, or null if there is none. */
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
	const shapes = [[input], [hidden, input], [output, hidden]] as const;
	for (const [index, shape] of shapes.entries()) {
		if (index === 0 && !sizes.visionProjectionNorm) continue;
		builder.same(projectorPrefix + logical[index]!, projectorStyles[style][index]!, shape);
	}
}
