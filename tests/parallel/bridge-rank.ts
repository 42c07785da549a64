/**
 * Rank program of bridge.test.ts: rows of given counts travel to the language lanes and their doubles come back, the
 * encoder as many microbatches ahead as in training. Prints what did not arrive as it should.
 */
import { BridgeDestination, BridgeSource, microbatchesAhead } from "../../src/parallel/bridge.ts";
import { parseLayout, topologyOfLayout } from "../../src/parallel/layout.ts";
import { moduleGroups } from "../../src/parallel/module-groups.ts";
import { World } from "../../src/parallel/world.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { deviceOfRank, placeOfRank } from "./ranks.ts";

const [layout, countsText] = process.argv.slice(2) as [string, string];
/** Rows of every sample, [microbatch][sample of the global microbatch]. */
const counts = JSON.parse(countsText) as number[][];
const width = 5;
const place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const topology = topologyOfLayout(parseLayout(layout));
const grid = topology.gridOf(world.rank);
const groups = await moduleGroups(world, grid, { experts: 0, sequenceParallel: false });
const leaders = topology.leaders.includes(world.rank) ? await world.group("bridge", topology.leaders) : null;
const ends = [device, topology, world.rank, { leaders, lane: groups.model.tp }, width, "f32"] as const;
const { dp: lane } = grid.coordinates(world.rank);
const wrong: string[] = [];

/** Samples of this rank's lane in a microbatch. */
function own(microbatch: number): { readonly samples: number[]; readonly rowsPerSample: number[] } {
	const perLane = counts[microbatch]!.length / grid.lanes;
	const samples = Array.from({ length: perLane }, (_, index) => lane * perLane + index);
	return { samples, rowsPerSample: samples.map((sample) => counts[microbatch]![sample]!) };
}

/** The values that the rows of this lane's samples have. */
function valuesOf(microbatch: number, factor: number): Float32Array {
	const { samples, rowsPerSample } = own(microbatch);
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

if (grid === topology.encoder) {
	const bridge = new BridgeSource(...ends);
	const back = (microbatch: number) => {
		const { rowsPerSample } = own(microbatch);
		using gradient = bridge.receiveBackward(rowsPerSample.reduce((sum, count) => sum + count, 0));
		check(`gradient ${microbatch}`, [...gradient.toFloat32()], [...valuesOf(microbatch, 2)]);
	};
	counts.forEach((_, microbatch) => {
		const { rowsPerSample } = own(microbatch);
		const values = valuesOf(microbatch, 1);
		// Released at once: what is on the way must not be lost with it.
		using rows = Tensor.from(device, values, [values.length / width, width]);
		bridge.sendForward({ rows, rowsPerSample });
		if (microbatch >= microbatchesAhead) back(microbatch - microbatchesAhead);
	});
	for (const [microbatch] of [...counts.entries()].slice(-microbatchesAhead)) back(microbatch);
	bridge.settle();
} else {
	const bridge = new BridgeDestination(...ends);
	counts.forEach((_, microbatch) => {
		const { samples, rowsPerSample } = own(microbatch);
		const received = bridge.receiveForward(samples.length);
		using rows = received.rows;
		check(`counts ${microbatch}`, received.rowsPerSample, rowsPerSample);
		check(`rows ${microbatch}`, [...rows.toFloat32()], [...valuesOf(microbatch, 1)]);
		using gradient = Tensor.from(device, valuesOf(microbatch, 2), rows.shape);
		// Without a gradient the encoder gets zeros; the last microbatch without rows has none.
		bridge.sendBackward(rows.rows === 0 ? null : gradient);
	});
	bridge.settle();
}
for (const message of wrong) console.log(message);
