/** Plans of hundreds of GPUs: sizes are counted, no pixel is made for them, and of thousands of layouts few are counted. */
import { expect, test } from "bun:test";
import { join } from "node:path";

const root = join(import.meta.dir, "../..");

/** Runs `mimo plan` in a process of its own; bytes that it held at most. */
function plan(args: readonly string[]) {
	const { exitCode, stdout, stderr, resourceUsage } = Bun.spawnSync(
		[process.execPath, "src/main.ts", "plan", ...args, "--gpu", "h200", "--json"],
		{ cwd: root, env: { ...process.env, MIMO_DEBUG: "0" }, stdout: "pipe", stderr: "pipe" },
	);
	expect([exitCode, stderr.toString()]).toEqual([0, ""]);
	return { result: JSON.parse(stdout.toString()), bytes: resourceUsage.maxRSS };
}

test("an encoder rank with the pictures of 256 lanes, of 38 GB, is planned in less than 1 GiB", () => {
	const flags = "--encoder-dp 1 --llm-offset 1 --llm-dp 256 --llm-ep 8 --global-batch-size 768".split(" ");
	const { result, bytes } = plan(["--config", "examples/nemotron-nano/nodes-8-disjoint.yaml", ...flags]);
	expect(bytes).toBeLessThan(2 ** 30);
	expect(result.modules[0].memory.peak).toBeGreaterThan(2 ** 43);
	const { limit, actor, computation, waiting } = result.bound;
	expect([limit, actor]).toEqual(["memory", 0]);
	expect(computation + waiting).toBeGreaterThan(0.9);
}, 60_000);

// Forty seconds of a processor.
if (process.env.MIMO_TEST_FULL)
	test("the layouts of 33 nodes: the best fits, and each says what bounds it", () => {
		const { result, bytes } = plan(["--config", "examples/slurm/nodes-33.yaml", "--split", "264"]);
		expect(bytes).toBeLessThan(2 ** 30);
		expect(result.length).toBeGreaterThan(20);
		expect(result[0].fits).toBe(true);
		// The layout of the example is among those that are counted.
		const example = { "encoder-tp": 1, "encoder-dp": 8, "llm-tp": 2, "llm-dp": 128, "llm-pp": 1, "llm-ep": 8 };
		expect(result.map(({ layout }: { layout: object }) => layout)).toContainEqual(expect.objectContaining(example));
		for (const { bound, fits, step } of result) {
			expect(fits).toBe(bound.limit !== "memory");
			const { computation, inHost, betweenHosts, waiting } = bound;
			for (const share of [computation, inHost, betweenHosts, waiting]) expect(share).toBeGreaterThanOrEqual(0);
			expect(computation + waiting).toBeLessThanOrEqual(1 + 1e-9);
			expect(step.seconds).toBeGreaterThan(0);
		}
	}, 240_000);
