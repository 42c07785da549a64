/**
 * Equal steps are the same operations on the same addresses, again and again, which CUDA graphs need
 * (cuda/gpu/device/operation_queue.h).
 */
import { expect, test } from "bun:test";
import { recomputeModuleNames } from "../../src/config/recompute-modules.ts";
import { configurationOf } from "../../src/config/resolve.ts";
import { operations } from "../../src/native/abi.ts";
import { Device } from "../../src/native/device.ts";
import type { Library, NativeFunction } from "../../src/native/library.ts";
import { World } from "../../src/parallel/world.ts";
import { runTraining } from "../../src/train/run.ts";
import { testLibrary } from "../support.ts";

/** `library`, whose operations are noted with their arguments. */
function noting(library: Library, calls: string[]): Library {
	const noted: Record<string, NativeFunction> = {};
	for (const name of Object.keys(operations)) {
		const call = library.symbols[`mimo_${name}`]!;
		noted[`mimo_${name}`] = (...args) => {
			calls.push(`${name} ${Buffer.from(args[1] as Uint8Array).toString("hex")}`);
			return call(...args);
		};
	}
	const symbols = new Proxy(library.symbols, { get: (known, name: string) => noted[name] ?? known[name] });
	return { ...library, symbols };
}

/** The operations of each step, from the optimizer's first to the next one's. */
function stepsOf(calls: readonly string[]): string[][] {
	const starts = calls.flatMap((call, at) => (call.startsWith("adam_advance ") ? [at] : []));
	return starts.slice(1).map((end, i) => calls.slice(starts[i], end));
}

/** The steps of a training on mock data. */
async function train(keys: Record<string, unknown>): Promise<string[][]> {
	const calls: string[] = [];
	using device = Device.open(noting(await testLibrary(), calls), { threads: 1 });
	using world = World.alone(device);
	const configuration = configurationOf({
		preset: "nemotron-vlm-tiny",
		"dataset-provider": "mock",
		"micro-batch-size": 1,
		"global-batch-size": 3,
		"train-iters": 7,
		"lr-warmup-iters": 1,
		bf16: true,
		"log-interval": 1000,
		...keys,
	});
	await runTraining(configuration, world);
	const steps = stepsOf(calls);
	expect(steps.length).toBe(6);
	expect(steps[0]!.length).toBeGreaterThan(300);
	return steps;
}

const selective = { "recompute-granularity": "selective", "recompute-modules": recomputeModuleNames };
test.each([
	["layers recomputed", { "recompute-granularity": "full" }],
	["modules recomputed", selective],
])(
	"of a language model, %s",
	async (_, keys) => {
		const steps = await train({ "llm-only": true, ...keys });
		expect(steps[4]).toEqual(steps[3]!);
		expect(steps[5]).toEqual(steps[4]!);
	},
	60_000,
);

// Microbatches have index arrays of several lengths: which of few blocks each gets changes, so that now and then one
// operation meets another for the first time.
test("of a vision-language model in one process", async () => {
	const steps = await train({ "llm-offset": 0 });
	const known = new Set(steps.slice(0, 4).flat());
	const later = steps.slice(4).flat();
	expect(later.filter((call) => !known.has(call)).length).toBeLessThan(0.02 * later.length);
}, 60_000);
