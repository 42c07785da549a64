/**
 * The data of every rank of a layout, when all layouts get the same samples: lane l of L takes the l-th run of them,
 * in microbatches of a size that the layout can cut.
 */
import { type ImageSet, noImages } from "../../data/images.ts";
import { type ImageTextMicrobatch, type Microbatch, noText, sampleLengths } from "../../data/microbatch.ts";
import { shareOf } from "../../data/routing/image-share.ts";
import type { NamedTopology } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { joinSampleImages, joinText, type Sample } from "./samples.ts";

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
 * Microbatch m of an encoder lane: the images of microbatch m of every language lane it serves; where several encoder
 * lanes serve one language lane, its share of the samples.
 */
export function encoderMicrobatches(plan: Plan, samples: readonly Sample[], lane: number): ImageSet[] {
	return range(plan.microbatches).map((m) => joinSampleImages(encoderSamples(plan, samples, lane, m)));
}

/** Samples of microbatch m of an encoder lane. */
export function encoderSamples<S>(plan: Plan, samples: readonly S[], lane: number, m: number): S[] {
	const { topology } = plan;
	const [edge] = topology.featureEdges;
	if (edge === undefined) return languageSamples(plan, samples, 0, m);
	const served = edge.routes.filter(({ source }) => source === lane).map(({ destination }) => destination);
	const all = served.flatMap((destination) => languageSamples(plan, samples, destination, m));
	const count = Math.max(1, edge.encoder.lanes / topology.language.lanes);
	return shareOf(all, { index: lane % count, count }, m);
}

/** The microbatches of a rank: of each module that it runs its part. */
export function dealtTo(rank: number, plan: Plan, samples: readonly Sample[]): ImageTextMicrobatch[] {
	const { encoders, language } = plan.topology;
	const [encoder] = encoders;
	const texts = language.contains(rank)
		? languageMicrobatches(plan, samples, language.coordinates(rank).dp)
		: range(plan.microbatches).map(() => noText);
	const images = encoder?.contains(rank)
		? encoderMicrobatches(plan, samples, encoder.coordinates(rank).dp)
		: texts.map((text) => noImages(sampleLengths(text).length));
	return texts.map((text, m) => ({ text, images: images[m]! }));
}

/** Encoder lanes with an image in any microbatch of the step. `withImages`: which samples have one. */
export function participants(plan: Plan, withImages: readonly boolean[]): number {
	return range(plan.topology.encoders[0]?.lanes ?? 1).filter((lane) =>
		range(plan.microbatches).some((m) => encoderSamples(plan, withImages, lane, m).includes(true)),
	).length;
}
