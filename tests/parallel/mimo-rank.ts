/** Rank program of mimo.test.ts: a reference folder on a layout; the last rank prints the report. */
import { layOut, type SideLayout } from "../../src/parallel/topology.ts";
import { World } from "../../src/parallel/world.ts";
import { mimoReference } from "../../src/parity/mimo/parity.ts";
import { compareTraining } from "../../src/parity/reference.ts";
import { deviceOfRank, placeOfRank } from "./ranks.ts";

const [folder, layout] = process.argv.slice(2) as [string, string];
const { encoder, language, steps, zero } = JSON.parse(layout) as {
	encoder: SideLayout;
	language: SideLayout;
	steps: number;
	zero: boolean;
};
using place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const topology = layOut([{ name: "radio_encoder", shape: encoder, colocated: false }], language);
const report = await compareTraining(world, { name: layout, topology }, mimoReference, folder, {
	steps,
	configure: (run) => ({ ...run, distributedOptimizer: zero }),
});
if (world.rank === topology.worldSize - 1) console.log(JSON.stringify(report));
