/** dist/mimo verify as a user runs it: a table, an exit code, JSON, and one sentence for every mistake. */
import { describe, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { defaultPrepareOptions, prepare } from "../../src/data/energon/prepare/prepare.ts";
import { canMount, mountNamespace } from "../absent.ts";
import { deviceFlags, executable, mimo } from "../commands/mimo.ts";
import { caption, type Member, png, Scratch, tar } from "../data/fixtures.ts";
import { Launched } from "../launch/launched.ts";

const small =
	"--preset nemotron-vlm-tiny --hybrid-layer-pattern ME --hidden-size 32 --kv-channels 8 --mamba-num-heads 4 " +
	"--mamba-head-dim 16 --mamba-state-dim 8 --vision-num-layers 1 --vision-hidden-size 32 --global-batch-size 8 " +
	`--micro-batch-size 2 ${deviceFlags}`;
const verify = (...args: string[]) => mimo(["verify", ...small.split(" "), ...args]);
const full = process.env.MIMO_TEST_FULL === "1";

test("prints a line for every layout and ends with 0", () => {
	const { exitCode, stdout, stderr } = verify("--layouts", "1+1,2+1");
	expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	expect(stdout).toMatch(
		/^Reference: layout 1, one process with both modules\. 8 samples of 64 tokens drawn from seed/,
	);
	expect(stdout).toMatch(
		/noise of this machine \(every weight moved by a rounding, the last microbatch first; largest of 3 runs\): loss \S+, gradient norm \S+, worst/,
	);
	expect(stdout).toMatch(/^1\+1 +4 × 2 .* bitwise equal +bitwise .* ok\b/m);
	expect(stdout).toMatch(/^2\+1 +4 × 2 .* bitwise equal +bitwise .* ok\b/m);
	expect(stdout).toEndWith("All 2 layouts give what one process gives.\n");
}, 60_000);

test("pipelines and shared ranks give what one process gives", () => {
	const more = full ? ",1+pp4,tp2|dp2ep2,dp2+pp2dp2ep2,1+pp2,tp2+pp2,dp2|pp2,dp4|tp2dp2ep2" : "";
	const layouts = `dp4|tp2pp2,dp2pp2+pp2${more}`;
	const model = ["--hybrid-layer-pattern", "ME|*-||E", "--vision-num-layers", "2"];
	const { exitCode, stdout } = verify("--layouts", layouts, ...model);
	for (const layout of ["dp4|tp2pp2", "dp2pp2+pp2"]) expect(stdout).toContain(layout);
	expect(exitCode).toBe(0);
}, 120_000);

test("modules are recomputed beside passes in turns and late weight gradients, bit for bit", () => {
	const turns = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute";
	const modules = ["core_attn", "layernorm", "mamba", "mlp", "moe_act", "shared_experts"];
	const { exitCode, stdout } = verify(
		...[
			"--layouts",
			`1+dp2ep2pp2${full ? ",dp4|tp2ep2dp2" : ""}`,
			"--hybrid-layer-pattern",
			"ME|*-ME",
			...turns.split(" "),
		],
		...["--recompute-granularity", "selective", "--recompute-modules", ...modules],
	);
	expect(stdout).toContain("in turns = apart");
	expect(stdout).toMatch(/^1\+dp2ep2pp2 .* bitwise equal +bitwise +bitwise .* ok\b/m);
	if (full) expect(stdout).toMatch(/^dp4\|tp2ep2dp2 .* bitwise equal +bitwise +bitwise .* ok\b/m);
	expect(exitCode).toBe(0);
}, 120_000);

test("a language model alone is compared on pipelines, with uneven and empty segments", () => {
	const alone = "--preset nemotron-tiny --hidden-size 32 --mamba-num-heads 4 --mamba-head-dim 16 --seq-length 32";
	const words = `${alone} --micro-batch-size 2 --global-batch-size 8 ${deviceFlags}`;
	const layouts = full ? ["pp4", "pp2dp2ep2", "pp2", "tp2pp2"] : ["pp4", "pp2dp2ep2"];
	const pattern = ["--hybrid-layer-pattern", "M*-||E|ME", "--layouts", layouts.join(",")];
	const { exitCode, stdout } = mimo(["verify", ...words.split(" "), ...pattern]);
	expect(stdout).toMatch(/^Reference: layout 1, one process\. 8 samples of 32 tokens drawn from seed \d+\.$/m);
	expect(stdout).toMatch(/^pp4 +4 × 2 .* bitwise equal +bitwise .* ok\b/m);
	expect(stdout).toEndWith(`All ${layouts.length} layouts give what one process gives.\n`);
	expect(exitCode).toBe(0);
}, 60_000);

test("experts' rows that go to a node of two ranks once give what one process gives, in turns too", () => {
	const nodes = "--moe-token-dispatcher-type flex --moe-hybridep-ranks-per-nvlink-domain 2";
	const turns = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute";
	const layouts = full ? "dp4|dp4ep4,dp4|tp2dp2ep2etp2" : "dp4|tp2dp2ep2etp2";
	const { exitCode, stdout } = verify("--layouts", layouts, ...nodes.split(" "), ...turns.split(" "));
	if (full) expect(stdout).toMatch(/^dp4\|dp4ep4 .* bitwise equal +bitwise +bitwise .* ok\b/m);
	expect(stdout).toMatch(/^dp4\|tp2dp2ep2etp2 .* bitwise equal +bitwise +bitwise .* ok\b/m);
	expect(exitCode).toBe(0);
}, 60_000);

test("the dispatcher that is chosen by rows gives what one process gives", () => {
	const chosen = "--moe-token-dispatcher-type auto --moe-hybridep-ranks-per-nvlink-domain 2";
	const { exitCode, stdout } = verify("--layouts", "dp2|dp2ep2,dp4|dp4ep4", ...chosen.split(" "));
	expect(stdout).toEndWith("All 2 layouts give what one process gives.\n");
	expect(exitCode).toBe(0);
}, 60_000);

test("experts' rows that all ranks gather give what one process gives, in turns too", () => {
	const gathered = ["--moe-token-dispatcher-type", "allgather"];
	const turns = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute";
	const [two, four] = ["dp2|dp2ep2", "dp4|tp2dp2ep2etp2"];
	for (const [order, layouts] of [
		[[], full ? [two, four] : [two]],
		[turns.split(" "), full ? [two, four] : [four]],
	] as const) {
		const { exitCode, stdout } = verify("--layouts", layouts.join(","), ...gathered, ...order);
		const apart = order.length === 0 ? "" : " +bitwise";
		for (const layout of layouts) {
			const line = `^${layout.replace("|", "\\|")} .* bitwise equal +bitwise${apart} .* ok\\b`;
			expect(stdout).toMatch(new RegExp(line, "m"));
		}
		expect(exitCode).toBe(0);
	}
}, 120_000);

test("pictures of several tiles, with a learned row behind their lines", () => {
	const rows = ["--vision-image-newline", "--no-pixel-shuffle", "--disable-vision-class-token"];
	const { exitCode, stdout } = verify("--layouts", "tp2+tp2,dp2|dp2,1+pp2", ...rows);
	expect([exitCode, stdout]).toEqual([0, expect.stringContaining("All 3 layouts give what one process gives.")]);
}, 120_000);

test("--json holds every parameter", () => {
	const { exitCode, stdout, stderr } = verify("--layouts", "1", "--json");
	expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	const report = JSON.parse(stdout);
	expect(report.passed).toBe(true);
	expect(report.layouts[0].verdict.gradients).toHaveLength(report.reference.tensors.length);
}, 60_000);

test("--samples data compares the first batch of the configured data, packs of several sequences here", () => {
	using scratch = new Scratch();
	const members = Array.from({ length: 64 }, (_, i): Member[] => [
		[`s${i}.png`, png(32 + 32 * (i % 2), 32, i)],
		[`s${i}.txt`, caption(i)],
	]);
	scratch.file("set/shard-000.tar", tar(members.flat()));
	const path = join(scratch.path, "set");
	prepare(path, {
		...defaultPrepareOptions,
		splitRatio: "1,0,0",
		sampleType: "CaptioningSample",
		fieldMap: '{"image": "png", "caption": "txt"}',
	});
	const data = ["--data-path", path, "--packing-buffer-size", "8", "--data-end-id", "10", "--num-workers", "1"];
	const layouts = ["1+tp2", "dp4|tp2pp2", ...(full ? ["4+2"] : [])];
	const { exitCode, stdout, stderr } = verify(...data, "--samples", "data", "--layouts", layouts.join(","));
	expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	expect(stdout).toMatch(
		/ 8 samples of 64 tokens of the energon data \(\/.*\/set\), 0 of them text alone, the others /,
	);
	expect(stdout).toEndWith(`All ${layouts.length} layouts give what one process gives.\n`);
}, 60_000);

test("a folder for temporary files that cannot be written is named", () => {
	const { exitCode, stdout, stderr } = mimo(["verify", ...small.split(" "), "--layouts", "2+1"], ".", {
		TMPDIR: "/nowhere",
	});
	expect([exitCode, stdout, stderr]).toEqual([
		1,
		"",
		"mimo: The folder for temporary files, /nowhere, cannot be written: it does not exist; TMPDIR names another.\n",
	]);
});

for (const signal of ["SIGINT", "SIGKILL"] as const) {
	for (const [when, printed] of [
		["the reference is made", null],
		["ranks run", /^Reference: /m],
	] as const) {
		test(`${signal} while ${when} leaves no files behind`, async () => {
			const folder = mkdtempSync(join(tmpdir(), "mimo-verify-ends-"));
			try {
				// Ranks take a second to start after a short reference; making one for longer only delays the signal.
				const samples = printed ? "32" : "128";
				const words = ["verify", ...small.split(" "), "--global-batch-size", samples, "--layouts", "1+1,2+1"];
				const launched = Launched.run([executable, ...words], { env: { TMPDIR: folder } });
				if (printed) await launched.said(printed);
				else while (readdirSync(folder).length === 0) await Bun.sleep(10);
				launched.process.kill(signal);
				const { exitCode } = await launched.end();
				expect(exitCode).not.toBe(0);
				for (let i = 0; i < 500 && readdirSync(folder).length > 0; i++) await Bun.sleep(20);
				expect(readdirSync(folder)).toEqual([]);
			} finally {
				rmSync(folder, { recursive: true });
			}
		}, 60_000);
	}
}

test("--policy shows the correction's factor", () => {
	const { exitCode, stdout } = verify("--layouts", "1,dp2+dp2ep2", "--policy");
	expect(exitCode).toBe(0);
	expect(stdout).toMatch(/^1 +1 of 1 +1\.0000 /m);
	expect(stdout).toMatch(/^dp2\+dp2ep2 +1 of 2 +2\.0000 .* 0\.\d+ +\d+\.\d+ %$/m);
}, 60_000);

test("ranks of another launcher compare themselves with a reference made before", async () => {
	const folder = mkdtempSync(join(tmpdir(), "mimo-reference-"));
	try {
		expect(verify("--layouts", "1", "--reference", folder).exitCode).toBe(0);
		using probe = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
		const { port } = probe;
		probe.stop();
		const ranks = [0, 1].map((rank) =>
			Bun.spawn([executable, "verify", ...small.split(" "), "--layouts", "1+1", "--reference", folder], {
				env: {
					...process.env,
					...{ RANK: String(rank), WORLD_SIZE: "2", LOCAL_RANK: String(rank) },
					...{ MASTER_ADDR: "127.0.0.1", MASTER_PORT: String(port) },
				},
				stdout: "pipe",
				stderr: "pipe",
			}),
		);
		const printed = await Promise.all(ranks.map(({ stdout }) => stdout.text()));
		expect(await Promise.all(ranks.map(({ exited }) => exited))).toEqual([0, 0]);
		expect(printed[0]).toBe("");
		expect(printed[1]).toEndWith("The layout gives what one process gives.\n");
	} finally {
		rmSync(folder, { recursive: true });
	}
}, 60_000);

test.skipIf(!canMount())(
	"a layout whose run fails has failed, the others are compared",
	() => {
		const mount = 'mount -t tmpfs -o size=6m tmpfs /dev/shm && exec "$@"';
		const command = [executable, "verify", ...small.split(" "), "--layouts", "2+4,1+1"];
		const ended = Bun.spawnSync([...mountNamespace, "sh", "-c", mount, "sh", ...command]);
		expect(ended.stderr.toString()).toMatch(/^mimo: rank \d \(.+\) failed: \/dev\/shm is full: /m);
		expect(ended.stdout.toString()).toMatch(/^2\+4 .* FAILED$/m);
		expect(ended.stdout.toString()).toMatch(/^1\+1 .* ok\b/m);
		expect(ended.stdout.toString()).toEndWith("2+4: its run ended with exit code 1.\nFAILED: 2+4.\n");
		expect(ended.exitCode).toBe(1);
	},
	60_000,
);

describe("a mistake is one sentence", () => {
	const cases: readonly [name: string, args: string[], message: RegExp][] = [
		["no layouts", [], /^mimo: verify needs --layouts, such as /],
		["a layout that is none", ["--layouts", "1+1,2x"], /^mimo: Layout "1\+1,2x": 2 at position 5: /],
		[
			"samples that cannot be dealt out",
			["--layouts", "1+3"],
			/^mimo: Layout 1\+3: global-batch-size 8 cannot be dealt/,
		],
		[
			"heads that cannot be cut",
			["--layouts", "1+tp8"],
			/^mimo: Layout 1\+tp8: --llm-tp: the value is 8; allowed is a divisor of /,
		],
		[
			"experts that cannot be divided",
			["--layouts", "1+dp8ep8", "--num-experts", "4"],
			/Layout 1\+dp8ep8: .*num-experts/s,
		],
		["a tolerance that is none", ["--layouts", "1", "--tolerance", "x"], /^mimo: --tolerance is "x"; allowed is/],
		["samples of no kind", ["--layouts", "1", "--samples", "x"], /^mimo: --samples is "x"; allowed is random /],
		[
			"text-only samples among the data's",
			["--layouts", "1", "--samples", "data", "--text-only", "2"],
			/^mimo: --text-only is for random samples; /,
		],
		["a layout without the encoder", ["--layouts", "pp2"], /^mimo: Layout pp2: it has no side for the encoder; /],
		[
			"an encoder that is none",
			["--layouts", "1+pp2", "--llm-only"],
			/^mimo: Layout 1\+pp2: the model has no encoder; a layout is one side, such as tp2pp2\.$/m,
		],
		["policies without an encoder", ["--layouts", "1", "--policy", "--llm-only"], /^mimo: --policy compares what /],
		["only text", ["--layouts", "1", "--text-only", "8"], /^mimo: --text-only is "8"; .* \(8\)\.$/m],
		[
			"balancing over microbatches of another size",
			["--layouts", "2+4,1+8", "--moe-router-load-balancing-type", "aux_loss"],
			/^mimo: Layout 1\+8 needs microbatches of 1 sample instead of 2: .* because .* aux_loss balances /,
		],
		[
			"global balancing",
			["--layouts", "1+1", "--moe-router-load-balancing-type", "global_aux_loss"],
			/^mimo: Results depend on the layout here: .* global_aux_loss /,
		],
	];
	for (const [name, args, message] of cases) {
		test(name, () => {
			const { exitCode, stdout, stderr } = verify(...args);
			expect(stderr).toMatch(message);
			expect(exitCode).toBeGreaterThan(0);
			expect(stdout).toBe("");
		});
	}
});

if (full)
	test("examples/vlm-tiny.yaml gives the same on every layout", () => {
		const layouts = "1+1,1+tp2,tp2+tp2ep2,dp2+dp2ep2,1+tp2dp2ep2,2+4,4+2,tp2dp2+tp2dp2ep2";
		const config = join(import.meta.dir, "../../examples/vlm-tiny.yaml");
		const { exitCode, stdout } = mimo(["verify", "--config", config, "--layouts", layouts]);
		expect(stdout).toEndWith("All 8 layouts give what one process gives.\n");
		expect(exitCode).toBe(0);
	}, 600_000);
