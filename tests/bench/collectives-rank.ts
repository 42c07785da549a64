/** Rank program of collectives.ts: times all-reduces among the ranks of one host; rank 0 prints the results as JSON. */
import { Device } from "../../src/native/device.ts";
import { openLibrary } from "../../src/native/library.ts";
import { World } from "../../src/parallel/world.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { placeOfRank } from "../parallel/ranks.ts";

using place = await placeOfRank();
using device = Device.open(await openLibrary("cpu"), { threads: 1 });
using world = World.join(device, place.run, place.rank, place.backend);
const group = await world.group(
	"world",
	Array.from({ length: world.size }, (_, rank) => rank),
);

/** Least seconds of `body`, all ranks beginning together: disturbances of a machine only add. */
function time(repetitions: number, body: () => void): number {
	const times: number[] = [];
	for (let i = 0; i < repetitions; i++) {
		group.barrier();
		const start = performance.now();
		body();
		times.push((performance.now() - start) / 1000);
	}
	return Math.min(...times);
}

const results: Record<string, number> = {};
for (const bytes of [1024, 65536, 1 << 20, 16 << 20]) {
	using x = Tensor.zeros(device, [bytes / 4]);
	using y = Tensor.zeros(device, [bytes / 4]);
	const repetitions = bytes <= 65536 ? 400 : 40;
	results[`all-reduce ${bytes}`] = time(repetitions, () => group.allReduce(x).wait());
	// Every rank copies at the same time: measures each one's share of the machine's memory bandwidth.
	results[`memcpy ${bytes}`] = time(repetitions, () => device.copy(y, x, x.bytes));
}
if (world.rank === 0) console.log(JSON.stringify(results));
