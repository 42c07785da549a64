import { expect, test } from "bun:test";
import { topologyJson, topologyTable } from "../../src/commands/topology.ts";
import { resolveConfiguration } from "../../src/config/resolve.ts";

function resolved(flags: string) {
	return resolveConfiguration(["--preset", "nemotron-tiny", ...flags.split(" ").filter((flag) => flag !== "")]);
}

const vision = "--model-provider nemotron-moe-vlm";
const fanIn = `${vision} --encoder-tp 2 --encoder-dp 2 --llm-tp 2 --llm-pp 2 --micro-batch-size 2`;

test("the table of a fan-in with pipeline stages", () => {
	expect(`${topologyTable(resolved(fanIn))}\n`).toBe(`\
8 ranks: radio_encoder 0-3, language 4-7. Loss tokens are counted by rank 6.

# Grids
module         ranks  tp  dp  pp  expt_tp  ep  expt_dp  lanes  micro-batch-size
radio_encoder  0-3    2   2   1   1        1   4        2      1
language       4-7    2   1   2   1        1   2        1      2

# Ranks
rank  module         stage  tp  dp  pp  expt_tp  ep  expt_dp
0     radio_encoder  0      0   0   0   0        0   0
1     radio_encoder  0      1   0   0   0        0   1
2     radio_encoder  0      0   1   0   0        0   2
3     radio_encoder  0      1   1   0   0        0   3
4     language       1      0   0   0   0        0   0
5     language       1      1   0   0   0        0   1
6     language       2      0   0   1   0        0   0
7     language       2      1   0   1   0        0   1

# Groups of radio_encoder
tp, tp_cp               [0,1] [2,3]
gtp, cp                 every rank alone
pp                      every rank alone
dp, dp_cp, dp_cp_gtp    [0,2] [1,3]
mp                      [0,1] [2,3]
tp_dp, tp_dp_cp         [0,1,2,3]
intra_dist_opt          [0,1,2,3]
ep                      every rank alone
expt_tp                 every rank alone
expt_gtp                every rank alone
expt_dp, expt_dp_gtp    [0,1,2,3]
tp_ep                   every rank alone
tp_ep_pp, tp_ep_gtp_pp  every rank alone
lanes                   [0,1] [2,3]

# Groups of language
tp, tp_cp               [4,5] [6,7]
gtp, cp                 every rank alone
pp                      [4,6] [5,7]
dp, dp_cp, dp_cp_gtp    every rank alone
mp                      [4,5,6,7]
tp_dp, tp_dp_cp         [4,5] [6,7]
intra_dist_opt          [4,5,6,7]
ep                      every rank alone
expt_tp                 every rank alone
expt_gtp                every rank alone
expt_dp, expt_dp_gtp    [4,5] [6,7]
tp_ep                   every rank alone
tp_ep_pp, tp_ep_gtp_pp  [4,6] [5,7]
embd                    [4,6] [5,7]
pos_embd                [4] [5]
lanes                   [4,5,6,7]

# Groups of both modules
world       [0..7]
bridge-src  [0,1] [2,3]
bridge-dst  [4,5]
bridge-p2p  [1,3,4]

# Routes of image rows
encoder lanes  leaders     language lanes  leaders
[0,1]          [1,3]    →  [0]             [4]
`);
});

test("many groups and large groups are cut short in the table and whole in JSON", () => {
	const large = resolved(`${vision} --encoder-dp 4 --llm-tp 2 --llm-dp 16 --llm-ep 8 --global-batch-size 64`);
	const lines = topologyTable(large).split("\n");
	expect(lines).toContain("dp, dp_cp, dp_cp_gtp    [4,6,…,34] [5,7,…,35]");
	expect(lines).toContain("intra_dist_opt          [4..35]");
	expect(lines).toContain(
		"tp, tp_cp               [4,5] [6,7] [8,9] [10,11] [12,13] [14,15] [16,17] … [34,35] (16 groups)",
	);
	expect(lines).toContain("bridge-p2p  [0,1,2,3,4,6,8,…,34] (20)");
	const json = JSON.parse(topologyJson(large));
	expect(json.modules[1].groups.tp).toHaveLength(16);
	expect(json.groups["bridge-p2p"][0]).toHaveLength(20);
});

test("JSON has every group by name, every rank, and the notes", () => {
	const json = JSON.parse(topologyJson(resolved("--llm-dp 1 --tensor-parallel-num-weight-shards 2")));
	expect(json).toMatchObject({
		worldSize: 2,
		colocated: false,
		routes: [],
		tokenSource: 0,
		groups: { world: [[0, 1]] },
	});
	expect(json.modules).toHaveLength(1);
	expect(json.modules[0]).toMatchObject({ name: "language", size: 2, microBatchSize: 4, lanes: [[0], [1]] });
	expect(Object.keys(json.modules[0].groups).sort()).toEqual(
		`cp dp dp_cp dp_cp_gtp embd ep expt_dp expt_dp_gtp expt_gtp expt_tp gtp intra_dist_opt mp pos_embd pp
tp tp_cp tp_dp tp_dp_cp tp_ep tp_ep_gtp_pp tp_ep_pp`.split(/\s+/),
	);
	expect(json.ranks[1]).toEqual({
		...{ rank: 1, module: "language", stage: 0 },
		...{ tp: 0, dp: 1, pp: 0, expt_tp: 0, ep: 0, expt_dp: 1 },
	});
	expect(json.notes).toHaveLength(1);
});

test("one process with both modules says so", () => {
	const table = topologyTable(resolved(`${vision} --llm-offset 0`));
	expect(table).toStartWith("1 rank: encoder and language model in one process.\n");
	expect(topologyTable(resolved(""))).toStartWith("1 rank: language 0.");
});
