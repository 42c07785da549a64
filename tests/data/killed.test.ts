/** Killed with SIGKILL at random moments, a reader goes on: keys and tensors are those of a reader left in peace. */
import { afterAll, expect, test } from "bun:test";
import { existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { defaultLoaderConfiguration } from "../../src/data/energon/loader/configuration.ts";
import { EnergonSource, type SourceOptions } from "../../src/data/routing/source.ts";
import { generator } from "../damage.ts";
import { captions, joinLanes, Scratch } from "./fixtures.ts";
import { batchDigest } from "./killed-digest.ts";
import { smallTask } from "./vision-language/task.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const kills = process.env.MIMO_TEST_FULL ? 50 : 4;

test(`${kills} kills with packing, blending and two workers`, async () => {
	captions(scratch, "one", [9, 14, 11]);
	captions(scratch, "two", [8, 13]);
	const items = "      - path: one\n        weight: 2\n      - path: two\n        weight: 1\n";
	const head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n";
	const options: Omit<SourceOptions, "state"> = {
		configuration: {
			...defaultLoaderConfiguration,
			path: scratch.file("blend.yaml", head + items),
			task: smallTask,
			worldSize: 2,
			numWorkers: 2,
			batchSize: 2,
			packingBufferSize: 6,
			shuffleBufferSize: 5,
		},
		lanes: [0, 1],
		routing: "routed",
		loader: { threads: 2 },
	};
	const folder = join(scratch.path, "run");
	mkdirSync(folder);
	writeFileSync(join(folder, "configuration.json"), JSON.stringify(options));
	const random = generator(9);
	for (let killed = 0; killed < kills; killed++) {
		const child = Bun.spawn([process.execPath, join(import.meta.dir, "killed-reader.ts"), folder, "1000000"], {
			stdout: "ignore",
			stderr: "inherit",
		});
		// Some moments after its first microbatch of this life, so that every life gets on.
		const before = takenIn(folder);
		while (takenIn(folder) <= before && child.exitCode === null) await Bun.sleep(2);
		await Bun.sleep(random(120));
		expect(child.exitCode).toBe(null);
		child.kill("SIGKILL");
		await child.exited;
	}
	const taken = takenIn(folder);
	expect(taken).toBeGreaterThanOrEqual(kills);
	await using source = await EnergonSource.open({ ...options, state: null });
	const expected: string[] = [];
	while (expected.length < taken) expected.push(batchDigest(joinLanes(await source.next())));
	let compared = 0;
	for (const file of readdirSync(folder)) {
		const place = /^digest-(\d+)-/.exec(file)?.[1];
		if (place === undefined || Number(place) >= taken) continue;
		// The file that was being written when the kill came may be empty or cut off.
		const digest = readFileSync(join(folder, file), "utf8");
		if (digest.length !== 64) continue;
		expect([place, digest]).toEqual([place, expected[Number(place)]!]);
		compared++;
	}
	expect(compared).toBeGreaterThanOrEqual(taken);
});

function takenIn(folder: string): number {
	const path = join(folder, "state.json");
	return existsSync(path) ? (JSON.parse(readFileSync(path, "utf8")) as { taken: number }).taken : 0;
}
