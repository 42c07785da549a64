/**
 * `npm run bench`: every operation against the machine's own measure, as ratios in one run.
 *
 *   bun tests/bench/bench.ts [--json FILE] [--threads 1,2] [SUITE ...]
 *   bun tests/bench/bench.ts --device cuda [--json FILE]     the CUDA library's operations; see cuda.ts
 *
 * products: against OpenBLAS's sgemm. streams: against memcpy. pytorch: against PyTorch, when MIMO_PYTHON, or python3 on
 * the PATH, has it; the training step against Hugging Face's own NemotronH when transformers is there too. conversions:
 * checkpoints against cp. collectives: two ranks, against memcpy and Gloo. expert-exchange: rows to experts of four ranks and
 * back, against the host's plan of them. overlap: a step of encoder and language model
 * on a rank each against the larger of both. plan: what `mimo plan` says against what runs. schedules: how long a
 * pipeline's stages wait for each other, against the formulas. lanes: how evenly encoder lanes share images. overhead: a step with all
 * logs, and traced, against one without. saves: how long training stands still for a checkpoint. folders: writing a
 * Hugging Face folder by four ranks, against as many dd. images: decoding and resizing pictures, against Pillow where Python has it.
 * generate: decoding against transformers. energon: reading a data set, against megatron-energon likewise. indexed: reading Megatron's
 * indexed data, and making them of text, against megatron-core likewise. packing: what of the sequences is padding, a table without times.
 */
import { availableParallelism } from "node:os";
import { parseArgs } from "node:util";
import { Device } from "../../src/native/device.ts";
import { openLibrary } from "../../src/native/library.ts";
import { benchCollectives } from "./collectives.ts";
import { benchConversions } from "./conversions.ts";
import { benchCuda, cudaTable } from "./cuda.ts";
import { benchEnergon, findEnergon } from "./energon.ts";
import { benchExpertExchange } from "./expert-exchange.ts";
import { benchFolders } from "./folders.ts";
import { benchGenerate } from "./generate.ts";
import { benchImages, findPillow } from "./images.ts";
import { benchIndexed, findMegatron } from "./indexed.ts";
import { benchLanes, lanesTable } from "./lanes.ts";
import { type Row, tables } from "./measure.ts";
import { openOpenblas } from "./openblas.ts";
import { benchOverhead } from "./overhead.ts";
import { benchOverlap } from "./overlap.ts";
import { packingTable } from "./packing.ts";
import { benchPlan } from "./plan.ts";
import { benchProducts } from "./products.ts";
import { benchPyTorch, findPython } from "./pytorch.ts";
import { benchSaves } from "./saves.ts";
import { benchSchedules } from "./schedules.ts";
import { benchStreams } from "./streams.ts";

const suites = [
	"products",
	"streams",
	"pytorch",
	"conversions",
	"collectives",
	"expert-exchange",
	"overlap",
	"plan",
	"schedules",
	"lanes",
	"overhead",
	"saves",
	"folders",
	"images",
	"energon",
	"generate",
	"indexed",
	"packing",
] as const;
const { values: flags, positionals } = parseArgs({
	options: { json: { type: "string" }, threads: { type: "string" }, device: { type: "string", default: "cpu" } },
	allowPositionals: true,
});
const unknown = positionals.find((name) => !(suites as readonly string[]).includes(name));
if (unknown !== undefined) {
	console.error(`bench: there is no suite ${unknown}; they are ${suites.join(", ")}.`);
	process.exit(2);
}
if (flags.device === "cuda") {
	const library = await openLibrary("cuda");
	using device = Device.open(library);
	const { name, instructions } = device.describe();
	console.log(`${name}, ${instructions}; ${library.versions}`);
	const rows = benchCuda(device);
	console.log(cudaTable(rows));
	if (flags.json) await Bun.write(flags.json, `${JSON.stringify({ device: name, rows }, null, "\t")}\n`);
	process.exit(0);
}
const wanted = (suite: (typeof suites)[number]) => positionals.length === 0 || positionals.includes(suite);
const threadCounts = (flags.threads ?? (availableParallelism() > 1 ? "1,2" : "1")).split(",").map(Number);

const library = await openLibrary("cpu");
const asksPython = wanted("pytorch") || wanted("collectives") || wanted("generate");
const python = asksPython ? findPython() : null;
const blas = wanted("products") ? openOpenblas() : null;
if (python === null && asksPython) {
	console.log("skip: pytorch (no Python with torch; MIMO_PYTHON names one)");
}
if (wanted("products") && blas === null) {
	console.log("skip: products (no shared OpenBLAS; Debian has it in libopenblas0-pthread)");
}
const rows: Row[] = [];
/** Keeps the rows of a suite and prints them at once: all suites take half an hour. */
const take = (more: readonly Row[]) => {
	rows.push(...more);
	console.log(tables(more));
};
for (const threads of threadCounts) {
	using device = Device.open(library, { threads });
	const { name, instructions } = device.describe();
	if (threads === threadCounts[0]) console.log(`${name}, ${instructions}; ${library.versions}`);
	if (blas !== null) take(await benchProducts(device, blas));
	if (wanted("streams")) take(await benchStreams(device));
	if (python !== null && wanted("pytorch")) take(await benchPyTorch(device, python));
	if (python !== null && wanted("generate")) {
		const { rows: found, notes } = await benchGenerate(device, python);
		take(found);
		console.log(notes.map((note) => `  ${note}`).join("\n"));
	}
}
if (wanted("conversions")) take(await benchConversions());
if (wanted("collectives")) take(await benchCollectives(python));
if (wanted("expert-exchange")) take(await benchExpertExchange());
if (wanted("overlap")) take(await benchOverlap());
if (wanted("plan")) take(benchPlan());
if (wanted("schedules")) take(benchSchedules());
if (wanted("lanes")) {
	console.log(lanesTable());
	take(await benchLanes());
}
if (wanted("overhead")) take(await benchOverhead());
if (wanted("saves")) take(benchSaves());
if (wanted("folders")) take(await benchFolders());
if (wanted("images")) {
	const withPillow = findPillow();
	if (withPillow === null) console.log("skip: images (no Python with Pillow; MIMO_PYTHON names one)");
	else take(benchImages(library, withPillow));
}
if (wanted("energon")) {
	const withEnergon = findEnergon();
	if (withEnergon === null) console.log("skip: energon (no Python with megatron-energon; MIMO_PYTHON names one)");
	else take(benchEnergon(withEnergon));
}
if (wanted("indexed")) {
	const withMegatron = findMegatron();
	if (withMegatron === null) console.log("skip: prepare-text (no MIMO_PYTHON with megatron-core and transformers)");
	take(benchIndexed(withMegatron));
}
if (wanted("packing")) console.log(packingTable());
const below = rows.filter(({ target, ratio }) => target !== null && ratio < target);
if (below.length > 0) console.log(`\nBelow what is wanted:\n${tables(below)}`);
console.log(`\n${rows.length} ratios, ${below.length} below what is wanted`);
if (flags.json) await Bun.write(flags.json, `${JSON.stringify(rows, null, "\t")}\n`);
