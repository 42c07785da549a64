/**
 * The data of every rank of a layout, when all layouts get the same samples: lane l of L takes the l-th run of them,
 * in microbatches of a size that the layout can cut.
 */
import type { ImageSet } from "../../data/images.ts";
import { type ImageTextMicrobatch, type Microbatch, noText } from "../../data/microbatch.ts";
import { shareOf } from "../../data/routing/image-share.ts";
import { type FeatureEdge, type NamedTopology, visionModule } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { joinSampleFeatures, joinText, type Sample } from "./samples.ts";

export interface Plan extends NamedTopology {
	/** Samples of a language lane's microbatch. */
	readonly microBatchSize: number;
	/** Microbatches of a lane in a step. */
	readonly microbatches: number;
}

/** Divisors of n, ascending. */
function divisors(n: number): number[] {
	return Array.from({ length: n }, (_, index) => index + 1).filter((divisor) => n % divisor === 0);
}

/**
 * Deals out `samples` samples of `sequenceLength` tokens. The micro-batch size is the configured one, or the nearest that divides
 * the samples, larger ones first. Throws a UserError that names the number that does not divide.
 */
export function planOf(
	{ name, topology }: NamedTopology,
	options: { readonly samples: number; readonly microBatchSize: number; readonly sequenceLength: number },
): Plan {
	const { samples, microBatchSize, sequenceLength } = options;
	const refuse = (why: string): never => {
		throw new UserError(`Layout ${name}: ${why}`, exitCodes.usage);
	};
	const lanes = topology.language.lanes;
	if (samples % lanes !== 0) {
		refuse(`global-batch-size ${samples} cannot be dealt out to ${counted(lanes, "data lane")} of the language model.`);
	}
	const fits = (size: number) => (size * sequenceLength) % topology.language.shape.tensor === 0;
	const sizes = divisors(samples / lanes).filter(fits);
	const best = sizes.find((size) => size >= microBatchSize) ?? sizes.at(-1);
	if (best === undefined) {
		const perLane = samples / lanes;
		return refuse(
			`no micro-batch size divides a lane's ${counted(perLane, "sample")} (global-batch-size ${samples}) and can be cut over ${counted(topology.language.shape.tensor, "tensor-parallel rank")}.`,
		);
	}
	return { name, topology, microBatchSize: best, microbatches: samples / lanes / best };
}

/** Throws a UserError for a layout whose microbatches are not those of `reference` where `reason` makes that another loss. */
export function requireEqualMicrobatches(plan: Plan, reference: Pick<Plan, "microBatchSize">, reason: string): void {
	const { name, microBatchSize } = plan;
	if (microBatchSize === reference.microBatchSize) return;
	throw new UserError(
		`Layout ${name} needs microbatches of ${counted(microBatchSize, "sample")} instead of ${reference.microBatchSize}: results depend on it, because ${reason}.`,
		2,
	);
}

/** Samples of microbatch m of a language lane. */
export function languageSamples<S>(plan: Plan, samples: readonly S[], lane: number, m: number): S[] {
	const { microBatchSize, microbatches } = plan;
	const first = (lane * microbatches + m) * microBatchSize;
	return samples.slice(first, first + microBatchSize);
}

const range = (count: number) => Array.from({ length: count }, (_, index) => index);

export function languageMicrobatches(plan: Plan, samples: readonly Sample[], lane: number): Microbatch[] {
	return range(plan.microbatches).map((m) => joinText(languageSamples(plan, samples, lane, m)));
}

/**
 * Microbatch m of a lane of an encoder: what it reads of microbatch m of every language lane it serves; where several encoder lanes
 * serve one language lane, its share of the samples.
 */
export function encoderMicrobatches(
	plan: Plan,
	samples: readonly Sample[],
	edge: FeatureEdge,
	lane: number,
): ImageSet[] {
	return range(plan.microbatches).map((m) =>
		joinSampleFeatures(encoderSamples(plan, samples, edge, lane, m), edge.encoder.name),
	);
}

/** Samples of microbatch m of a lane of an encoder. */
export function encoderSamples<S>(
	plan: Plan,
	samples: readonly S[],
	{ encoder, routes }: FeatureEdge,
	lane: number,
	m: number,
): S[] {
	const served = routes.filter(({ source }) => source === lane).map(({ destination }) => destination);
	const all = served.flatMap((destination) => languageSamples(plan, samples, destination, m));
	const count = Math.max(1, encoder.lanes / plan.topology.language.lanes);
	return shareOf(all, { index: lane % count, count }, m);
}

/** The microbatches of a rank: of each module that it runs its part. */
export function dealtTo(rank: number, plan: Plan, samples: readonly Sample[]): ImageTextMicrobatch[] {
	const { featureEdges, language } = plan.topology;
	const texts = language.contains(rank)
		? languageMicrobatches(plan, samples, language.coordinates(rank).dp)
		: range(plan.microbatches).map(() => noText);
	const read = featureEdges
		.filter(({ encoder }) => encoder.contains(rank))
		.map((edge) => {
			const { name } = edge.encoder;
			return [name, encoderMicrobatches(plan, samples, edge, edge.encoder.coordinates(rank).dp)] as const;
		});
	return texts.map((text, m) => ({ text, features: Object.fromEntries(read.map(([name, sets]) => [name, sets[m]!])) }));
}

/** Lanes of the vision encoder with an image in any microbatch of the step. `withImages`: which samples have one. */
export function participants(plan: Plan, withImages: readonly boolean[]): number {
	const edge = plan.topology.featureEdges.find(({ encoder }) => encoder.name === visionModule);
	if (edge === undefined) return withImages.includes(true) ? 1 : 0;
	return range(edge.encoder.lanes).filter((lane) =>
		range(plan.microbatches).some((m) => encoderSamples(plan, withImages, edge, lane, m).includes(true)),
	).length;
}
