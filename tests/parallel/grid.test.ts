/** The worked examples of docs/spec/runtime.md §1.4, group by group. */
import { expect, test } from "bun:test";
import { encoderMicroBatchSize } from "../../src/config/derive.ts";
import { configurationOf } from "../../src/config/resolve.ts";
import { describeTopology, type NamedGroups } from "../../src/parallel/describe-topology.ts";
import { linksOf, reversed } from "../../src/parallel/edge-layout.ts";
import { Grid, groupWith } from "../../src/parallel/grid.ts";
import { groupOfOne } from "../../src/parallel/group.ts";
import { moduleGroups } from "../../src/parallel/module-groups.ts";
import { layOut, type SideLayout, Topology, topologyOf } from "../../src/parallel/topology.ts";

/** A vision-language model with these sizes. */
function configured(sizes: Record<string, number>) {
	const preset = { preset: "nemotron-20l", "model-provider": "nemotron-moe-vlm" };
	const configuration = configurationOf({ ...preset, ...sizes });
	const topology = topologyOf(configuration);
	return { configuration, topology, description: describeTopology(topology) };
}

/** "[0,1][2,3]" → ranks; "[0..3]" is a span. */
function parseGroups(text: string): number[][] {
	return [...text.matchAll(/\[([^\]]+)\]/g)].map(([, inside]) => {
		const [begin, end] = inside!.split("..").map(Number);
		return end === undefined ? inside!.split(",").map(Number) : from(begin!, end + 1);
	});
}

const from = (begin: number, end: number, step = 1) =>
	Array.from({ length: Math.ceil((end - begin) / step) }, (_, index) => begin + index * step);

function byName(groups: readonly NamedGroups[]): Record<string, unknown> {
	return Object.fromEntries(groups.map(({ name, groups }) => [name, groups]));
}

/** Groups by name: text such as "[0,1][2,3]", ranks, or "alone". */
type Wanted = Readonly<Record<string, string | number[][]>>;

/** Every group of a module is the wanted one, and every wanted one is there. */
function expectGroups(
	groups: readonly NamedGroups[],
	ranks: readonly number[],
	wanted: Readonly<Record<string, string | number[][]>>,
) {
	const written = Object.entries(wanted).flatMap(([names, value]) => {
		const parsed =
			typeof value !== "string" ? value : value === "alone" ? ranks.map((rank) => [rank]) : parseGroups(value);
		return names.split(", ").map((name) => [name, parsed]);
	});
	expect(byName(groups)).toEqual(Object.fromEntries(written));
}

const encoderOfA: Wanted = {
	tp: "[0,1][2,3]",
	tp_ep: "alone",
	dp: "[0,2][1,3]",
	"tp_dp, expt_dp": "[0..3]",
};

test("A': tp2 dp2 ep2 beside an encoder of tp2 dp2", () => {
	const sizes = { "encoder-tp": 2, "encoder-dp": 2, "llm-tp": 2, "llm-dp": 2, "llm-ep": 2 };
	const { configuration, topology, description } = configured(sizes);
	expect(topology.worldSize).toBe(8);
	expectGroups(description.modules[0]!.groups, from(0, 4), encoderOfA);
	expectGroups(description.modules[1]!.groups, from(4, 8), {
		"tp, tp_ep": "[4,5][6,7]",
		"dp, expt_dp": "[4,6][5,7]",
		tp_dp: "[4..7]",
	});
	expect(description.modules.map(({ lanes }) => lanes)).toEqual([parseGroups("[0,1][2,3]"), parseGroups("[4,5][6,7]")]);
	expectGroups(description.groups, [], {
		world: "[0..7]",
		"edge.radio_encoder": "[0..7]",
	});
	expect(topology.featureEdges[0]!.layout).toEqual({ from: parseGroups("[0,1][2,3]"), to: parseGroups("[4,5][6,7]") });
	expect(encoderMicroBatchSize(configuration)).toBe(1);
});

test("A: weight shards give the same lanes and batches as A'", () => {
	const shared = { "encoder-tp": 2, "encoder-dp": 2, "llm-tp": 2, "llm-ep": 2 };
	const shards = { "tensor-parallel-num-weight-shards": 4, "expert-tensor-parallel-num-weight-shards": 2 };
	const sharded = configured({ ...shared, "llm-dp": 1, ...shards });
	expect(sharded.description).toEqual(configured({ ...shared, "llm-dp": 2 }).description);
	expect(sharded.configuration.globalBatchSize).toBe(8);
	expect(encoderMicroBatchSize(sharded.configuration)).toBe(1);
});

test("A'': tp2 dp2 ep4", () => {
	const { description } = configured({
		"encoder-tp": 2,
		"encoder-dp": 2,
		"llm-tp": 2,
		"llm-dp": 2,
		"llm-ep": 4,
	});
	expectGroups(description.modules[0]!.groups, from(0, 4), encoderOfA);
	expectGroups(description.modules[1]!.groups, from(4, 8), {
		tp: "[4,5][6,7]",
		expt_dp: "alone",
		dp: "[4,6][5,7]",
		"tp_dp, tp_ep": "[4..7]",
	});
});

test("B: fan-in and pipeline stages", () => {
	const { configuration, topology, description } = configured({
		"encoder-tp": 2,
		"encoder-dp": 4,
		"llm-tp": 2,
		"llm-pp": 2,
		"llm-dp": 2,
		"llm-ep": 2,
		"micro-batch-size": 2,
	});
	expect(topology.worldSize).toBe(16);
	expectGroups(description.modules[0]!.groups, from(0, 8), {
		tp: "[0,1][2,3][4,5][6,7]",
		tp_ep: "alone",
		dp: "[0,2,4,6][1,3,5,7]",
		"tp_dp, expt_dp": "[0..7]",
	});
	expectGroups(description.modules[1]!.groups, from(8, 16), {
		"tp, tp_ep": "[8,9][10,11][12,13][14,15]",
		"dp, expt_dp": "[8,10][9,11][12,14][13,15]",
		tp_dp: "[8..11][12..15]",
		pp: "[8,12][9,13][10,14][11,15]",
		mp: "[8,9,12,13][10,11,14,15]",
		module: "[8..15]",
	});
	expectGroups(description.groups, [], {
		world: "[0..15]",
		"edge.radio_encoder": "[0..11]",
	});
	expect(description.routes).toEqual([
		{
			module: "radio_encoder",
			sources: [0, 1],
			sourceRanks: [0, 1, 2, 3],
			destinations: [0],
			destinationRanks: [8, 9],
		},
		{
			module: "radio_encoder",
			sources: [2, 3],
			sourceRanks: [4, 5, 6, 7],
			destinations: [1],
			destinationRanks: [10, 11],
		},
	]);
	expect(topology.language.stageEdge(0)).toEqual({
		from: parseGroups("[8,9][10,11]"),
		to: parseGroups("[12,13][14,15]"),
	});
	expect(topology.language.stageEdge(1)).toEqual({
		from: parseGroups("[12,13][14,15]"),
		to: parseGroups("[8,9][10,11]"),
	});
	expect(encoderMicroBatchSize(configuration)).toBe(1);
});

test("C: 264 ranks", () => {
	const { configuration, topology, description } = configured({
		"encoder-dp": 8,
		"llm-tp": 2,
		"llm-dp": 128,
		"llm-ep": 8,
		"global-batch-size": 768,
	});
	const pairs = from(0, 128).map((k) => [8 + 2 * k, 9 + 2 * k]);
	const nodes = from(0, 32).map((n) => from(8 + 8 * n, 16 + 8 * n));
	const experts = from(0, 8).map((j) => from(8 + j, 264, 8));
	expect(topology.worldSize).toBe(264);
	expectGroups(description.modules[0]!.groups, from(0, 8), {
		"tp, tp_ep": "alone",
		"dp, tp_dp, expt_dp": "[0..7]",
	});
	expectGroups(description.modules[1]!.groups, from(8, 264), {
		tp: pairs,
		dp: [from(8, 263, 2), from(9, 264, 2)],
		tp_dp: "[8..263]",
		tp_ep: nodes,
		expt_dp: experts,
	});
	expect(description.routes).toEqual(
		from(0, 8).map((e) => ({
			module: "radio_encoder",
			sources: [e],
			sourceRanks: [e],
			destinations: from(16 * e, 16 * e + 16),
			destinationRanks: from(8 + 32 * e, 40 + 32 * e),
		})),
	);
	expectGroups(description.groups, from(0, 8), {
		world: "[0..263]",
		"edge.radio_encoder": "[0..263]",
	});
	expect(encoderMicroBatchSize(configuration)).toBe(16);
});

test("the groups described are those that the ranks of a run make", async () => {
	const { topology, description } = configured({
		"encoder-tp": 2,
		"encoder-dp": 2,
		"llm-tp": 2,
		"llm-dp": 4,
		"llm-ep": 4,
	});
	for (const [index, grid] of topology.modules.entries()) {
		const made: Record<string, number[][]> = {};
		for (const rank of grid.ranks) {
			const group = (name: string, ranks: readonly number[]) => {
				made[name] ??= [];
				if (ranks[0] === rank) made[name].push([...ranks]);
				return Promise.resolve({ ...groupOfOne(name, rank), ranks, size: ranks.length });
			};
			await moduleGroups({ rank, group }, grid, { experts: 8, sequenceParallel: true });
		}
		const named = description.modules[index]!.groups.map(({ name, groups }) => [`${grid.name}.${name}`, groups]);
		expect(made).toEqual(Object.fromEntries(named));
	}
});

test("links join ranks at the same place of their lanes; what a rank holds itself does not come from others", () => {
	const side = { tensor: 1, data: 1, pipeline: 1, expert: 1, expertTensor: 1 };
	const links = (topology: Topology, rank: number) => linksOf(topology.featureEdges[0]!.layout, rank);
	const encoder = (shape: SideLayout, colocated: boolean) => [{ name: "radio_encoder", shape, colocated }];
	const disjoint = layOut(encoder({ ...side, tensor: 2, data: 2 }, false), { ...side, tensor: 2 });
	expect(links(disjoint, 1).sends).toEqual([{ peer: 5, part: 0, parts: 1 }]);
	expect(links(disjoint, 4).receives).toEqual([
		{ peer: 0, part: 0, parts: 2 },
		{ peer: 2, part: 1, parts: 2 },
	]);
	const colocated = layOut(encoder({ ...side, data: 4 }, true), { ...side, tensor: 2, data: 2 });
	expect(links(colocated, 0).receives.map(({ peer }) => peer)).toEqual([0, 1]);
	expect(links(colocated, 1).sends.map(({ peer }) => peer)).toEqual([0, 1]);
	const back = linksOf(reversed(colocated.featureEdges[0]!.layout), 1);
	expect(back.receives).toEqual([{ peer: 1, part: 0, parts: 1 }]);
});

test("expert tensor parallelism varies fastest in the expert view", () => {
	const grid = new Grid("language", 4, { tensor: 2, data: 4, pipeline: 1, expert: 2, expertTensor: 2 });
	expect(grid.coordinates(4 + 7)).toEqual({ tp: 1, cp: 0, dp: 3, pp: 0, expt_tp: 1, ep: 1, expt_dp: 1 });
	expect(groupWith(grid, "expt_dp", 7)).toEqual([7, 11]);
	expect(groupWith(grid, "tp_ep", 7)).toEqual([4, 5, 6, 7]);
});

test("grids and topologies that cannot be are refused", () => {
	const shape = { tensor: 2, data: 2, pipeline: 1, expert: 1, expertTensor: 1 };
	const grid = (offset: number, more: object) => new Grid("language", offset, { ...shape, ...more });
	expect(() => grid(-1, {})).toThrow("language grid: offset is -1.");
	expect(() => grid(0, { data: 0 })).toThrow("language grid: data is 0.");
	expect(() => grid(0, { tensor: 1.5 })).toThrow("language grid: tensor is 1.5.");
	expect(() => grid(0, { expert: 3 })).toThrow("3 ranks of an expert view do not divide 4");
	const encoder = new Grid("radio_encoder", 0, shape);
	expect(() => new Topology([encoder], grid(3, {}))).toThrow("starts at rank 3, the encoders' end at 4");
	expect(() => new Topology([encoder], grid(5, {}))).toThrow("starts at rank 5");
	expect(() => new Topology([encoder], grid(4, { data: 3 }))).toThrow("2 lanes of radio_encoder do not match 3");
	expect(() => new Topology([encoder], grid(0, { data: 1 }))).toThrow("start at one rank, but have 4 and 2 ranks");
	expect(() => new Topology([encoder], grid(4, {})).gridOf(8)).toThrow("Rank 8 belongs to no grid");
});

test("several encoders: one after the other, some on the language model's ranks", () => {
	const side = { tensor: 1, data: 1, pipeline: 1, expert: 1, expertTensor: 1 };
	const encoder = (name: string, shape: object, colocated: boolean) => ({
		name,
		shape: { ...side, ...shape },
		colocated,
	});
	const topology = layOut(
		[encoder("vision", { tensor: 2 }, false), encoder("audio", { data: 2 }, true), encoder("depth", {}, false)],
		{ ...side, tensor: 2 },
	);
	expect(topology.modules.map(({ name, offset, size }) => [name, offset, size])).toEqual([
		["vision", 0, 2],
		["audio", 3, 2],
		["depth", 2, 1],
		["language", 3, 2],
	]);
	expect([0, 2, 3].map((rank) => topology.moduleOf(rank))).toEqual(["vision", "depth", "audio+language"]);
	expect(topology.featureEdges.map(({ layout }) => layout)).toEqual([
		{ from: [[0, 1]], to: [[3, 4]] },
		{ from: [[3], [4]], to: [[3, 4]] },
		{ from: [[2]], to: [[3, 4]] },
	]);
	expect(topology.colocated).toBeFalse();
});
