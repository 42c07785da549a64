import { expect, test } from "bun:test";
import { topologyJson, topologyTable } from "../../src/commands/topology.ts";
import { resolveConfiguration } from "../../src/config/resolve.ts";

function resolved(flags: string) {
	return resolveConfiguration(["--preset", "nemotron-tiny", ...flags.split(" ").filter((flag) => flag !== "")]);
}

const vision = "--model-provider nemotron-moe-vlm";
const fanIn = `${vision} --encoder-tp 2 --encoder-dp 2 --llm-tp 2 --llm-pp 2 --micro-batch-size 2 --hybrid-layer-pattern ME*|-MEM`;

test("the table of a fan-in with pipeline stages", () => {
	expect(`${topologyTable(resolved(fanIn))}\n`).toBe(`\
8 ranks: radio_encoder 0-3, language 4-7.

# Grids
module         ranks  tp  cp  dp  pp  expt_tp  ep  expt_dp  lanes  micro-batch-size
radio_encoder  0-3    2   1   2   1   1        1   4        2      1
language       4-7    2   1   1   2   1        1   2        1      2

# Ranks
rank  module         tp  cp  dp  pp  expt_tp  ep  expt_dp
0     radio_encoder  0   0   0   0   0        0   0
1     radio_encoder  1   0   0   0   0        0   1
2     radio_encoder  0   0   1   0   0        0   2
3     radio_encoder  1   0   1   0   0        0   3
4     language       0   0   0   0   0        0   0
5     language       1   0   0   0   0        0   1
6     language       0   0   0   1   0        0   0
7     language       1   0   0   1   0        0   1

# Groups of radio_encoder
tp       [0,1] [2,3]
dp       [0,2] [1,3]
tp_dp    [0,1,2,3]
expt_dp  [0,1,2,3]
tp_ep    every rank alone
lanes    [0,1] [2,3]

# Groups of language
tp       [4,5] [6,7]
dp       every rank alone
tp_dp    [4,5] [6,7]
expt_dp  [4,5] [6,7]
tp_ep    every rank alone
pp       [4,6] [5,7]
mp       [4,5,6,7]
module   [4,5,6,7]
lanes    [4,5,6,7]

# Groups of both modules
world               [0..7]
edge.radio_encoder  [0..5]

# Routes of image rows
encoder lanes  ranks         language lanes  ranks
[0,1]          [0,1,2,3]  →  [0]             [4,5]
`);
});

test("many groups and large groups are cut short in the table and whole in JSON", () => {
	const large = resolved(`${vision} --encoder-dp 4 --llm-tp 2 --llm-dp 16 --llm-ep 8 --global-batch-size 64`);
	const lines = topologyTable(large).split("\n");
	expect(lines).toContain("dp       [4,6,…,34] [5,7,…,35]");
	expect(lines).toContain("tp_dp    [4..35]");
	expect(lines).toContain("tp       [4,5] [6,7] [8,9] [10,11] [12,13] [14,15] [16,17] … [34,35] (16 groups)");
	expect(lines).toContain("edge.radio_encoder  [0..35]");
	const json = JSON.parse(topologyJson(large));
	expect(json.modules[1].groups.tp).toHaveLength(16);
	expect(json.groups["edge.radio_encoder"][0]).toHaveLength(36);
});

test("context-parallel ranks are replicas that share a lane", () => {
	const table = topologyTable(resolved("--llm-tp 2 --llm-cp 2 --llm-dp 2 --seq-length 16"));
	const groups = [
		"tp       [0,1] [2,3] [4,5] [6,7]",
		"cp       [0,2] [1,3] [4,6] [5,7]",
		"tp_cp    [0,1,2,3] [4,5,6,7]",
	];
	expect(table.split("\n")).toEqual(
		expect.arrayContaining([...groups, "dp       [0,2,4,6] [1,3,5,7]", "lanes    [0,1,2,3] [4,5,6,7]"]),
	);
});

test("JSON has every group by name, every rank, and the notes", () => {
	const json = JSON.parse(topologyJson(resolved("--llm-dp 1 --tensor-parallel-num-weight-shards 2")));
	expect(json).toMatchObject({
		worldSize: 2,
		colocated: false,
		routes: [],
		groups: { world: [[0, 1]] },
	});
	expect(json.modules).toHaveLength(1);
	expect(json.modules[0]).toMatchObject({ name: "language", size: 2, microBatchSize: 4, lanes: [[0], [1]] });
	expect(Object.keys(json.modules[0].groups)).toEqual(["tp", "dp", "tp_dp", "expt_dp", "tp_ep"]);
	expect(json.ranks[1]).toEqual({
		...{ rank: 1, module: "language" },
		...{ tp: 0, cp: 0, dp: 1, pp: 0, expt_tp: 0, ep: 0, expt_dp: 1 },
	});
	expect(json.notes).toHaveLength(1);
});

test("one process with both modules says so", () => {
	const table = topologyTable(resolved(`${vision} --llm-offset 0`));
	expect(table).toStartWith("1 rank: encoder and language model in one process.\n");
	expect(topologyTable(resolved(""))).toStartWith("1 rank: language 0.");
});
