/**
 * Rank program of edge.test.ts: rows of given counts travel to the language lanes and their doubles come back, the encoder
 * two microbatches ahead. Where both sides share ranks, each microbatch goes there and back. Prints what did not arrive.
 */
import { samplesOfShares, shareOf } from "../../src/data/routing/image-share.ts";
import { Edge } from "../../src/parallel/edge.ts";
import { ranksOf } from "../../src/parallel/edge-layout.ts";
import type { Grid } from "../../src/parallel/grid.ts";
import { parseLayout, topologyOfLayout } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { deviceOfRank, placeOfRank } from "./ranks.ts";

const [layout, countsText] = process.argv.slice(2) as [string, string];
/** Rows of every sample, [microbatch][sample of the global microbatch]. */
const counts = JSON.parse(countsText) as number[][];
const width = 5;
using place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const topology = topologyOfLayout(parseLayout(layout));
const layoutOfRows = topology.featureEdges[0]!.layout;
const group = (way: string) => world.group(`edge.${way}`, ranksOf(layoutOfRows));
const edge = new Edge(device, {
	...{ layout: layoutOfRows, rank: world.rank, width, dtype: "f32", counted: true, inFlight: 4 },
	groups: { forward: await group("forward"), backward: await group("backward") },
});
/** Microbatches that the encoder is ahead. */
const ahead = topology.colocated ? 0 : 2;
const wrong: string[] = [];

/** Samples of this rank's lane of a module in a microbatch. */
function own(grid: Grid, microbatch: number): { readonly samples: number[]; readonly rowsPerSample: number[] } {
	const { dp: lane } = grid.coordinates(world.rank);
	// Several encoder lanes share a language lane's samples, or take its microbatches in turn.
	const count = Math.max(1, grid.lanes / topology.language.lanes);
	const perLane = (count * counts[microbatch]!.length) / grid.lanes;
	const first = Math.floor(lane / count) * perLane;
	const all = Array.from({ length: perLane }, (_, index) => first + index);
	const samples = shareOf(all, { index: lane % count, count }, microbatch);
	return { samples, rowsPerSample: samples.map((sample) => counts[microbatch]![sample]!) };
}

/** The values that the rows of this lane's samples have. */
function valuesOf(grid: Grid, microbatch: number, factor: number): Float32Array {
	const { samples, rowsPerSample } = own(grid, microbatch);
	return Float32Array.from(
		samples.flatMap((sample, index) =>
			Array.from(
				{ length: rowsPerSample[index]! * width },
				(_, at) => factor * (1000 * microbatch + 100 * sample + at + 1),
			),
		),
	);
}

function check(what: string, actual: unknown, expected: unknown): void {
	if (JSON.stringify(actual) !== JSON.stringify(expected)) {
		wrong.push(`${what}: ${JSON.stringify(actual)} instead of ${JSON.stringify(expected)}`);
	}
}

function send(grid: Grid, microbatch: number): void {
	const values = valuesOf(grid, microbatch, 1);
	// Released at once: messages in flight must not be lost with it.
	using rows = Tensor.from(device, values, [values.length / width, width]);
	edge.sendForward({ rows, rowsPerSample: own(grid, microbatch).rowsPerSample }, { returns: true });
}

function back(grid: Grid, microbatch: number): void {
	using gradient = edge.receiveBackward();
	check(`gradient ${microbatch}`, [...(gradient?.toFloat32() ?? [])], [...valuesOf(grid, microbatch, 2)]);
}

function there(grid: Grid, microbatch: number): void {
	const { samples, rowsPerSample } = own(grid, microbatch);
	const received = edge.receiveForward(samplesOfShares(samples.length, edge.sources, microbatch), { returns: true });
	using rows = received.rows;
	check(`counts ${microbatch}`, received.rowsPerSample, rowsPerSample);
	check(`rows ${microbatch}`, [...rows.toFloat32()], [...valuesOf(grid, microbatch, 1)]);
	// Without a gradient the encoder gets zeros; the last microbatch without rows has none.
	edge.sendBackward(rows.rows === 0 ? null : Tensor.from(device, valuesOf(grid, microbatch, 2), rows.shape));
}

const { encoders, language } = topology;
const [encoder] = encoders;
for (let microbatch = 0; microbatch < counts.length + ahead; microbatch++) {
	if (encoder!.contains(world.rank) && microbatch < counts.length) send(encoder!, microbatch);
	if (language.contains(world.rank) && microbatch < counts.length) there(language, microbatch);
	if (encoder!.contains(world.rank) && microbatch >= ahead) back(encoder!, microbatch - ahead);
}
edge.settle();
for (const message of wrong) console.log(message);
