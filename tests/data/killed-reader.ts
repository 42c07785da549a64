/**
 * Reads microbatches and, after each, writes its digest and the state to go on from, until `count` are there or it is
 * killed: `bun killed-reader.ts FOLDER COUNT`. FOLDER/configuration.json says what to read.
 */
import { existsSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { EnergonSource, type SourceOptions, type SourceState } from "../../src/data/routing/source.ts";
import { joinLanes } from "./fixtures.ts";
import { batchDigest } from "./killed-digest.ts";

interface Saved {
	readonly taken: number;
	readonly state: SourceState;
}

const [folder, count] = [process.argv[2]!, Number(process.argv[3])];
const options = JSON.parse(readFileSync(join(folder, "configuration.json"), "utf8")) as Omit<SourceOptions, "state">;
const stateFile = join(folder, "state.json");
const saved = existsSync(stateFile) ? (JSON.parse(readFileSync(stateFile, "utf8")) as Saved) : null;
await using source = await EnergonSource.open({ ...options, state: saved?.state ?? null });
for (let taken = saved?.taken ?? 0; taken < count; taken++) {
	// A digest written twice must be the same: the parent compares all that were ever written.
	const digest = batchDigest(joinLanes(await source.next()));
	writeFileSync(join(folder, `digest-${taken}-${process.pid}`), digest);
	const next: Saved = { taken: taken + 1, state: await source.save() };
	writeFileSync(`${stateFile}.part`, JSON.stringify(next));
	renameSync(`${stateFile}.part`, stateFile);
}
writeFileSync(join(folder, "done"), "");
