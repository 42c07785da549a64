/** The models that `mimo bench` steps, with the flags of `mimo train`, and the losses that their first steps have. */
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";

/** A model to step: one that publications step too, or that any machine can. */
interface BenchModel {
	readonly summary: string;
	/** Flags for `ranks` GPUs, or processes where it runs on processors. */
	readonly flags: (ranks: number) => string;
	/** Flags that make its products e4m3, as far as they can be; null: it runs on processors. */
	readonly e4m3: string | null;
	/** First losses by number of ranks. They hold for any number of steps of this model's schedule. */
	readonly trails: Readonly<Record<number, readonly number[]>>;
	/** Largest relative difference from them. */
	readonly tolerance: number;
}

/** Length of the learning rate's schedule, so that a run of any length follows it from the start. */
const schedule = "--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-decay-iters 100 --lr-warmup-iters 2";
const benchmark = "--dataset-provider mock --eval-interval 1000 --log-interval 1 --log-throughput";

const e4m3 = "--fp8-format e4m3 --fp8-recipe blockwise";

/** A published language model's step on GPUs in bf16, four microbatches of 8,192 tokens a GPU, with moments in bf16. */
const published = (preset: string, ranks: number, more: readonly string[]) =>
	[
		`--device cuda --preset ${preset} --model-provider nemotron-moe-vlm --llm-only --llm-dp ${ranks} --seq-length 8192 --micro-batch-size 1`,
		`--global-batch-size ${4 * ranks} --bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16`,
		...more,
		`${schedule} ${benchmark}`,
	].join(" ");

/** The same of a mixture of experts, `experts` of them on a GPU, with as many rows each. */
const experts = (preset: string, ranks: number, perGpu: number) =>
	published(preset, ranks, [
		`--llm-ep ${ranks} --num-experts ${perGpu * ranks} --moe-router-force-load-balancing --moe-token-dispatcher-type auto`,
		...(ranks > 1 ? ["--overlap-moe-expert-parallel-comm"] : []),
	]);

/** Of losses of GPUs in bf16, whose kernels may change: runs have differed by up to 3e-3 within ten steps. */
const gpuTolerance = 5e-3;

/** A model that steps on GPUs, with the first losses on one. */
const onGpu = <const Trail extends readonly number[]>(summary: string, flags: BenchModel["flags"], trail: Trail) => ({
	summary,
	flags,
	e4m3: flags(1).includes("--num-experts")
		? `${e4m3} --fp8-modules experts projections --fp8-wgrad`
		: `${e4m3} --fp8-modules projections`,
	trails: { 1: trail },
	tolerance: gpuTolerance,
});

export const benchModels = {
	laptop: {
		summary: "a hybrid of Mamba-2, attention, MLPs and experts for processors, in fp32",
		flags: (ranks) =>
			`--device cpu --preset nemotron-vlm-tiny --llm-only --hidden-size 256 --seq-length 512 --llm-dp ${ranks} --micro-batch-size 1 --global-batch-size 4 ${schedule} ${benchmark}`,
		e4m3: null,
		// Mock data are drawn by lane.
		trails: {
			1: [7.529483, 7.496293, 7.422818, 7.430078, 7.460692, 7.467368, 7.423831, 7.320779, 7.390223, 7.321703],
			2: [7.519714, 7.537102, 7.405314, 7.45267, 7.333762, 7.392573, 7.35899, 7.317382, 7.344345, 7.418374],
		},
		// What AVX2 and AVX-512 differ by is far smaller.
		tolerance: 1e-4,
	},
	"nemotron-nano": onGpu(
		"Nemotron-3-Nano's language model with 16 of its 128 experts a GPU, in bf16: the record's step, 4 × 8,192 tokens a GPU",
		(ranks) => experts("nemotron-nano-30b-a3b", ranks, 16),
		[12.182765, 12.195363, 12.187662, 12.20225, 12.190287, 12.1785, 12.171562, 12.158763, 12.134481, 12.134898],
	),
	"qwen3-30b-a3b": onGpu(
		"Qwen3-30B-A3B with 16 of its 128 experts a GPU, likewise",
		(ranks) => experts("qwen3-30b-a3b", ranks, 16),
		[12.338099, 12.335607, 12.339195, 12.340047, 12.307211, 12.257619, 12.222975, 12.168779, 12.148818, 12.137618],
	),
	"qwen3-next": onGpu(
		"Qwen3-Next-80B-A3B with 16 of its 512 experts a GPU, likewise",
		(ranks) => experts("qwen3-next-80b-a3b", ranks, 16),
		[12.343843, 12.345377, 12.344407, 12.344132, 12.341588, 12.345605, 12.330257, 12.325844, 12.312799, 12.303023],
	),
	"gpt-oss-20b": onGpu(
		"gpt-oss 20B with 8 of its 32 experts a GPU, likewise",
		(ranks) => experts("gpt-oss-20b", ranks, 8),
		[12.789948, 12.794264, 12.781123, 12.792912, 12.765521, 12.765196, 12.76563, 12.757349, 12.792578, 12.786847],
	),
	"llama-3.1-8b": onGpu(
		"20 of the 32 layers of Llama 3.1 8B, likewise",
		(ranks) => published("llama-3.1-8b", ranks, [`--hybrid-layer-pattern ${"*-".repeat(20)}`]),
		[12.581549, 12.579295, 12.572185, 12.565259, 12.571311, 12.566448, 12.573964, 12.53732, 12.422175, 12.320642],
	),
	"gemma-3-4b": onGpu(
		"Gemma 3 4B's language model, likewise",
		(ranks) => published("gemma-3-4b", ranks, []),
		[12.996583, 12.989103, 12.991209, 12.987661, 12.982402, 12.972957, 12.958283, 12.941652, 12.927144, 12.905237],
	),
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
