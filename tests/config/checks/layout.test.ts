import { expect, test } from "bun:test";
import { sharesRanks } from "../../../src/config/derive.ts";
import { resolveConfiguration } from "../../../src/config/resolve.ts";
import { UserError } from "../../../src/system/errors.ts";

// Heads 4 in 2 groups, Mamba heads 8 in 2 groups, widths 128 and 256, 8 experts, 256 tokens, micro batch 4.
const tiny = ["--preset", "nemotron-tiny", "--global-batch-size", "720"];
const vision = [...tiny, "--model-provider", "nemotron-moe-vlm"];

function resolve(base: readonly string[], flags: string) {
	return resolveConfiguration([...base, ...(flags === "" ? [] : flags.split(" "))]);
}

/** The sentences that refuse these flags. */
function mistakes(base: readonly string[], flags: string): string[] {
	try {
		resolve(base, flags);
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		const lines = error.message.split("\n");
		return lines.length === 1 ? lines : lines.slice(1).map((line) => line.trim());
	}
	throw new Error(`${flags} was accepted.`);
}

test.each([
	[
		"--micro-batch-size 1 --global-batch-size 9007199254740990 --llm-dp 2",
		tiny,
		"--global-batch-size: the value is 9007199254740990; with it every data lane has 4503599627370495 microbatches, and at most 65536 are allowed.",
	],
	// DeepStack and positions of three axes.
	[
		"--deepstack-visual-indexes 0 --vision-projection-type mlp --encoder-pp 2 --encoder-balance number --llm-offset 2",
		vision,
		"--encoder-pp: the value is 2; allowed with class tokens (--class-token-len) and deepstack-visual-indexes or vision-feature-layers is 1.",
	],
	[
		"--deepstack-visual-indexes 1 0 --vision-projection-type mlp",
		vision,
		"--deepstack-visual-indexes: the value is [1,0]; allowed with vision-projection-type mlp is an ascending list of layers below vision-num-layers (32).",
	],
	[
		"--vision-feature-layers 30 31",
		vision,
		"--vision-feature-layers: the value is [30,31]; allowed without deepstack-visual-indexes and pixel-shuffle is an ascending list of layers before the last of vision-num-layers (32).",
	],
	[
		"--mrope-section 3 3 3 --position-embedding-type rope",
		vision,
		"--mrope-section: the value is [3,3,3]; allowed with position-embedding-type rope are three numbers, of time, row and column, that sum to the 16 frequencies of a head.",
	],
	// Spans.
	["--llm-offset 2", tiny, "--llm-offset: the value is 2; allowed is 0 without an encoder."],
	["--llm-only --llm-offset 4", vision, "--llm-offset: the value is 4; allowed is 0 with llm-only."],
	[
		"--encoder-dp 4 --llm-offset 2 --llm-dp 4",
		vision,
		"--llm-offset: the value is 2; allowed is encoder-tp × encoder-dp (4), or 0 where both modules have equally many ranks: on ranks 2-3 both modules would run.",
	],
	[
		"--encoder-dp 4 --llm-offset 0 --llm-dp 1",
		vision,
		"--llm-offset: the value is 0; allowed is encoder-tp × encoder-dp (4), or 0 where both modules have equally many ranks: on rank 0 both modules would run.",
	],
	[
		"--encoder-tp 2 --encoder-dp 2 --llm-offset 6 --llm-dp 2",
		vision,
		"--llm-offset: the value is 6; allowed is encoder-tp × encoder-dp (4), or 0 where both modules have equally many ranks: on ranks 4-5 no module would run.",
	],
	["--llm-offset -1", vision, "--llm-offset: the value is -1; allowed is an integer of at least 0."],
	// Sizes.
	[
		"--llm-cp 3 --seq-length 12",
		tiny,
		"--llm-cp: the value is 3; allowed is a size that deals out the heads of a tensor-parallel rank evenly: num-attention-heads is 4 in 2 groups, llm-tp 1.",
	],
	[
		"--llm-cp 2 --seq-length 5 --micro-batch-size 1 --global-batch-size 1",
		tiny,
		"--llm-cp: the value is 2; times llm-tp it has to divide micro-batch-size × seq-length (5), and a rank needs at least 3 tokens.",
	],
	[
		"--llm-cp 2 --export-kd-teacher-load teacher",
		tiny,
		"--llm-cp: the value is 2; allowed is 1 with export-kd-teacher-load.",
	],
	["--llm-dp 0", tiny, "--llm-dp: the value is 0; allowed is an integer of at least 1."],
	[
		"--llm-tp 2 --tensor-parallel-num-weight-shards 3",
		tiny,
		"--tensor-parallel-num-weight-shards: the value is 3; allowed is a multiple of llm-tp (2).",
	],
	[
		"--llm-tp 2 --tensor-parallel-num-weight-shards 1",
		tiny,
		"--tensor-parallel-num-weight-shards: the value is 1; allowed is a multiple of llm-tp (2).",
	],
	[
		"--llm-dp 2 --llm-expt-tp 2 --expert-tensor-parallel-num-weight-shards 3",
		tiny,
		"--expert-tensor-parallel-num-weight-shards: the value is 3; allowed is a multiple of llm-expt-tp (2).",
	],
	[
		"--llm-dp 4 --llm-ep 2 --expert-tensor-parallel-num-weight-shards 4",
		tiny,
		"--expert-tensor-parallel-num-weight-shards: the value is 4; times llm-ep (2) it has to divide the 4 ranks of llm-tp × data lanes.",
	],
	[
		"--llm-dp 4 --llm-ep 4 --moe-token-dispatcher-type flex --moe-hybridep-ranks-per-nvlink-domain 3",
		tiny,
		"--moe-hybridep-ranks-per-nvlink-domain: the value is 3; allowed is a number that divides llm-ep × llm-expt-tp (4) and llm-offset (0), or a multiple of the first which the second is too; llm-expt-tp (1) divides it.",
	],
	[
		"--llm-dp 2 --llm-ep 2 --moe-token-dispatcher-type allgather --moe-expert-capacity-bound 2",
		tiny,
		"--moe-expert-capacity-bound: the value is 2; moe-token-dispatcher-type allgather has room for all that can come, and no bound yet.",
	],
	["--llm-dp 3 --llm-ep 3", tiny, "--llm-ep: the value is 3; allowed is a divisor of num-experts (8)."],
	[
		"--llm-tp 2 --llm-ep 2 --llm-expt-tp 2",
		tiny,
		"--llm-ep: the value is 2; times llm-expt-tp (2) it has to divide the 2 ranks of llm-tp × data lanes.",
	],
	[
		"--llm-dp 2 --llm-expt-tp 4",
		tiny,
		"llm-ep (default): the value is 1; times llm-expt-tp (4) it has to divide the 2 ranks of llm-tp × data lanes.",
	],
	// Sizes that tensor parallelism cuts.
	[
		"--llm-tp 3",
		tiny,
		"--llm-tp: the value is 3; allowed is a divisor of num-attention-heads (4) and of num-query-groups (2) and of mamba-num-heads (8) and of mamba-num-groups (2) and of ffn-hidden-size (256) and of moe-shared-expert-intermediate-size (128) and of vocab-size padded to make-vocab-size-divisible-by (256) and of micro-batch-size × seq-length (1024).",
	],
	[
		"--vocab-size 257 --make-vocab-size-divisible-by 1 --llm-tp 2",
		tiny,
		"--llm-tp: the value is 2; allowed is a divisor of vocab-size padded to make-vocab-size-divisible-by (257).",
	],
	[
		"--llm-tp 4 --hybrid-layer-pattern *",
		tiny,
		"--llm-tp: the value is 4; allowed is a divisor of num-query-groups (2).",
	],
	[
		"--llm-tp 4 --hybrid-layer-pattern M",
		tiny,
		"--llm-tp: the value is 4; allowed is a divisor of mamba-num-groups (2).",
	],
	[
		"--llm-tp 2 --mamba-num-heads 9 --mamba-num-groups 3 --hybrid-layer-pattern M",
		tiny,
		"--llm-tp: the value is 2; allowed is a divisor of mamba-num-heads (9) and of mamba-num-groups (3).",
	],
	[
		"--llm-tp 2 --ffn-hidden-size 255 --hybrid-layer-pattern -",
		tiny,
		"--llm-tp: the value is 2; allowed is a divisor of ffn-hidden-size (255).",
	],
	[
		"--llm-tp 2 --moe-shared-expert-intermediate-size 127 --hybrid-layer-pattern E",
		tiny,
		"--llm-tp: the value is 2; allowed is a divisor of moe-shared-expert-intermediate-size (127).",
	],
	[
		"--llm-tp 2 --micro-batch-size 1 --seq-length 255",
		tiny,
		"--llm-tp: the value is 2; allowed is a divisor of micro-batch-size × seq-length (255).",
	],
	[
		"--llm-tp 2 --seq-length 255 --eval-micro-batch-size 1",
		tiny,
		"--llm-tp: the value is 2; allowed is a divisor of eval-micro-batch-size × seq-length (255).",
	],
	[
		"--llm-dp 3 --llm-expt-tp 3",
		tiny,
		"--llm-expt-tp: the value is 3; allowed is a divisor of moe-ffn-hidden-size (128).",
	],
	// The affine projector's rows.
	[
		"--encoder-tp 3",
		vision,
		"--encoder-tp: the value is 3; allowed is a divisor of hidden-size (128) and of vision-hidden-size (1280) and of vision-num-attention-heads (16) and of vision-ffn-hidden-size (5120).",
	],
	// Lanes and batches.
	[
		"--encoder-dp 3 --llm-dp 2",
		vision,
		"--encoder-dp: the value is 3; allowed is a divisor or a multiple of the language model's data lanes (2).",
	],
	[
		"--llm-dp 2 --global-batch-size 12",
		tiny,
		"--global-batch-size: the value is 12; allowed is a multiple of micro-batch-size × data lanes (8).",
	],
	// Pipeline stages.
	[
		"--llm-pp 2",
		tiny,
		"--llm-pp: the value is 2; allowed is a divisor of its 7 layers where no | in hybrid-layer-pattern cuts them into segments.",
	],
	[
		"--llm-pp 2 --hybrid-layer-pattern M|E|M",
		tiny,
		"--llm-pp: the value is 2; allowed is a divisor of the 3 segments into which | cuts hybrid-layer-pattern.",
	],
	[
		"--llm-pp 7 --microbatch-group-size-per-virtual-pipeline-stage 3",
		tiny,
		"--microbatch-group-size-per-virtual-pipeline-stage: the value is 3; allowed is at least llm-pp (7).",
	],
	// Overlap.
	["--encoder-ddp-overlap", vision, "--encoder-ddp-overlap: the value is true; allowed only with overlap-grad-reduce."],
	[
		"--encoder-ddp-overlap --overlap-grad-reduce --llm-only",
		vision,
		"--encoder-ddp-overlap: the value is true; allowed only without llm-only.",
	],
	[
		"--mimo-encoder-prefetch --encoder-dp 2",
		vision,
		"--mimo-encoder-prefetch: the value is true; it needs freeze-vit.",
	],
	[
		"--mimo-encoder-prefetch --freeze-vit --encoder-tp 2",
		vision,
		"--mimo-encoder-prefetch: the value is true; it needs encoder-tp 1.",
	],
	[
		"--mimo-encoder-prefetch --freeze-vit --llm-offset 0",
		vision,
		"--mimo-encoder-prefetch: the value is true; it needs an encoder on ranks of its own.",
	],
] as const)("%s", (flags, base, message) => {
	expect(mistakes(base, flags)).toEqual([message]);
});

test("errors of the layout are reported together with all others", () => {
	const flags = "--lr -1 --encoder-dp 2 --llm-offset 3 --llm-dp 3 --llm-tp 3 --llm-ep 5 --global-batch-size 7";
	expect(mistakes(vision, flags).map((line) => line.split(":")[0])).toEqual([
		"--lr",
		"--global-batch-size",
		"--llm-ep",
		"--llm-offset",
		"--encoder-dp",
		"--llm-tp",
	]);
});

test("checks that depend on a refused size are not reported", () => {
	expect(mistakes(vision, "--llm-tp 2 --tensor-parallel-num-weight-shards 3 --encoder-dp 5")).toEqual([
		"--tensor-parallel-num-weight-shards: the value is 3; allowed is a multiple of llm-tp (2).",
	]);
});

test("valid layouts are accepted", () => {
	for (const flags of [
		"",
		"--encoder-dp 2 --llm-dp 4",
		"--encoder-dp 4 --llm-dp 2 --micro-batch-size 2",
		"--encoder-tp 2 --llm-tp 2 --llm-ep 2 --llm-offset 2",
		"--llm-tp 2 --llm-dp 2 --llm-ep 2 --llm-expt-tp 2",
		"--encoder-ddp-overlap --overlap-grad-reduce --overlap-param-gather",
		"--llm-only --llm-tp 2",
		"--llm-pp 7",
		"--llm-pp 2 --hybrid-layer-pattern M|ME||*",
		"--llm-offset 0 --encoder-dp 2 --llm-pp 2 --hybrid-layer-pattern ME|M",
	]) {
		expect(resolve(vision, flags).notes.filter((note) => !note.startsWith("Without effect here: "))).toEqual([]);
	}
});

test("offset 0 with equally many ranks puts both modules on the same ones", () => {
	expect(sharesRanks(resolve(vision, "--llm-offset 0").configuration)).toBe(true);
	expect(sharesRanks(resolve(vision, "").configuration)).toBe(false);
	expect(sharesRanks(resolve(tiny, "").configuration)).toBe(false);
	expect(sharesRanks(resolve(vision, "--llm-offset 0 --encoder-dp 2 --llm-tp 2").configuration)).toBe(true);
	expect(mistakes(vision, "--llm-offset 0 --llm-dp 2")[0]).toContain("on rank 0 both modules would run");
});

test("weight shards are said once to be data parallelism", () => {
	expect(
		resolve(
			tiny,
			"--llm-tp 2 --llm-dp 3 --tensor-parallel-num-weight-shards 4 --expert-tensor-parallel-num-weight-shards 2",
		).notes,
	).toEqual([
		"Weight shards run as extra data parallelism with the same 6 data lanes: a rank holds whole what Megatron cuts into 2 (dense) and 2 (expert) shards.",
	]);
	expect(resolve(tiny, "--llm-tp 2 --tensor-parallel-num-weight-shards 2").notes).toEqual([]);
});
