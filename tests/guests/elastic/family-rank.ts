/**
 * Rank program of family.test.ts: logits of a masked parent on a layout at every budget of routers of several seeds, one after
 * the other, in the file OUTPUT.RANK on ranks of the last stage: f32 [choices, tokens, this rank's columns].
 */
import { writeFileSync } from "node:fs";
import { routerIn } from "../../../src/guests/elastic/elastic.ts";
import { withoutNoise } from "../../../src/guests/elastic/router/network.ts";
import { Losses } from "../../../src/train/losses.ts";
import { budgets, expertBias, text } from "./family-model.ts";
import { FamilyRank } from "./family-run.ts";

const [layout, keys, seeds, output] = process.argv.slice(2) as [string, string, string, string];
using rank = await FamilyRank.open(layout, JSON.parse(keys), { frozenLanguage: true });
const { device, world, run } = rank;
for (const { expertBias: own } of run.language!.routers.values()) device.copyToDevice(own, expertBias);
const { state } = run;
const router = routerIn(run.guests)!;
const found: Float32Array[] = [];
for (let seed = 0; seed < Number(seeds); seed++) {
	router.initialise(seed);
	for (const value of budgets) {
		const draw = withoutNoise({ value, parent: value === 1 });
		using sampled = router.sample([draw], 9, { trains: false });
		using losses = new Losses(device, state.lossOwner, state.lossNames);
		const keep = (name: string, logits: { toFloat32: () => Float32Array }) => {
			if (name === "logits") found.push(logits.toFloat32());
		};
		state.passes.evaluate([text], losses, keep, sampled.microbatches);
	}
	world.progress(seed + 1);
}
const bytes = found.map((values) => new Uint8Array(values.buffer, values.byteOffset, values.byteLength));
if (bytes.length > 0) writeFileSync(`${output}.${world.rank}`, Buffer.concat(bytes));
