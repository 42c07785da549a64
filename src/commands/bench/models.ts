/** The models that `mimo bench` steps, with the flags of `mimo train`, and the losses that their first steps have. */
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";

/** A model to step: one that publications step too, or that any machine can. */
interface BenchModel {
	readonly summary: string;
	/** Flags for `ranks` GPUs, or processes where it runs on processors. */
	readonly flags: (ranks: number) => string;
	/** First losses by number of ranks. They hold for any number of steps of this model's schedule. */
	readonly trails: Readonly<Record<number, readonly number[]>>;
	/** Largest relative difference from them. */
	readonly tolerance: number;
}

/** Length of the learning rate's schedule, so that a run of any length follows it from the start. */
const schedule = "--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-decay-iters 100 --lr-warmup-iters 2";
const benchmark = "--dataset-provider mock --eval-interval 1000 --log-interval 1 --log-throughput";

export const benchModels = {
	laptop: {
		summary: "a hybrid of Mamba-2, attention, MLPs and experts for processors, in fp32",
		flags: (ranks) =>
			`--device cpu --preset nemotron-vlm-tiny --llm-only --hidden-size 256 --seq-length 512 --llm-dp ${ranks} --micro-batch-size 1 --global-batch-size 4 ${schedule} ${benchmark}`,
		// Mock data are drawn by lane.
		trails: {
			1: [7.529483, 7.496293, 7.422818, 7.430078, 7.460692, 7.467368, 7.423831, 7.320779, 7.390223, 7.321703],
			2: [7.519714, 7.537102, 7.405314, 7.45267, 7.333762, 7.392573, 7.35899, 7.317382, 7.344345, 7.418374],
		},
		// What AVX2 and AVX-512 differ by is far smaller.
		tolerance: 1e-4,
	},
	"nemotron-nano": {
		summary:
			"Nemotron-3-Nano's language model with 16 of its 128 experts a GPU, in bf16: the record's step, 4 × 8,192 tokens a GPU",
		flags: (ranks) =>
			[
				`--device cuda --preset nemotron-nano-30b-a3b --model-provider nemotron-moe-vlm --llm-only --llm-dp ${ranks} --llm-ep ${ranks}`,
				`--num-experts ${16 * ranks} --seq-length 8192 --micro-batch-size 1 --global-batch-size ${4 * ranks} --bf16`,
				`--moe-router-force-load-balancing --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --moe-token-dispatcher-type auto`,
				...(ranks > 1 ? ["--overlap-moe-expert-parallel-comm"] : []),
				`${schedule} ${benchmark}`,
			].join(" "),
		// None was kept yet: its losses are of GPUs, in bf16.
		trails: {},
		tolerance: 5e-3,
	},
} as const satisfies Record<string, BenchModel>;
export type BenchModelName = keyof typeof benchModels;

/** Throws a UserError that names the first step whose loss is off. Steps beyond the trail are not compared; returns how many are. */
export function compareLosses(losses: readonly number[], trail: readonly number[], tolerance: number): number {
	const compared = Math.min(losses.length, trail.length);
	for (let step = 0; step < compared; step++) {
		const [loss, stored] = [losses[step]!, trail[step]!];
		const difference = Math.abs(loss / stored - 1);
		if (difference <= tolerance) continue;
		throw new UserError(
			`Step ${step + 1} has loss ${loss}, where the stored trail has ${stored}: ${difference.toExponential(1)} apart, allowed is ${tolerance}. A step that computes something else is no record.`,
			exitCodes.failure,
		);
	}
	return compared;
}
