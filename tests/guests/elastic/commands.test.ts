/** `mimo elastic` and `convert-ckpt --permute` as a user runs them: every format in and out, and layouts of the results. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync, writeFileSync } from "node:fs";
import { NativeCheckpoint } from "../../../src/checkpoint/native/reader.ts";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { resolveIteration, TorchDistFolder } from "../../../src/checkpoint/torch-dist/folder.ts";
import { deviceFlags, mimo } from "../../commands/mimo.ts";
import { Scratch } from "../../data/fixtures.ts";

const folder = new Scratch();
afterAll(() => folder[Symbol.dispose]());

const model = "--preset nemotron-tiny --hidden-size 64 --hybrid-layer-pattern MEM*E- --seq-length 64";
const training = `train ${model} --lr-warmup-iters 1 --lr 3e-3 --lr-decay-iters 60 --dataset-provider text --data-path text.txt ${deviceFlags}`;
const choice = `hidden-size: 48
mamba-num-heads: [6, 4]
num-attention-heads: 2
num-experts: [4, 6]
moe-ffn-hidden-size: [96, 64]
drop-layers: [5]
`;
const sources = ["native", "hf", "torch_dist"] as const;
const full = process.env.MIMO_TEST_FULL === "1";

function run(command: string): { readonly stdout: string; readonly stderr: string } {
	const { exitCode, stdout, stderr } = mimo(command.split(" "), folder.path);
	expect([command, exitCode, stderr.includes("mimo:") ? stderr : ""]).toEqual([command, 0, ""]);
	return { stdout, stderr };
}

const lossOf = (where: string, data = "text.txt"): number =>
	(
		JSON.parse(run(`evaluate ${where} --seq-length 64 --data ${data} --json ${deviceFlags}`).stdout) as {
			datasets: { loss: number }[];
		}
	).datasets[0]!.loss;

beforeAll(() => {
	folder.file("text.txt", "the quick brown fox jumps over the lazy dog and runs away. ".repeat(80));
	folder.file("choice.yaml", choice);
	run(`${training} --train-iters 60 --save native --save-interval 60`);
	run("convert-ckpt --to hf native hf");
	run("convert-ckpt --to torch_dist native torch_dist");
	run(`elastic rank --load native --data text.txt --samples 8 --output ranking.json ${deviceFlags}`);
}, 120_000);

describe("extract", () => {
	test("from and to every format gives one model, on one rank and on several", () => {
		const losses: number[] = [];
		for (const source of sources) {
			const { stdout, stderr } = run(
				`elastic extract --load ${source} --choice choice.yaml --save ${source}-native --to native`,
			);
			expect(stdout).toContain("hidden-size 48 of 64, 5 of 6 layers, 0.20 M of 0.51 M parameters");
			const notice = `The optimizer state of ${source} is the parent's: the submodel gets none.\n`;
			expect(stderr.endsWith(notice)).toBe(source !== "hf");
			losses.push(lossOf(`--load ${source}-native`));
			// What is read does not depend on what is written: every target from one source.
			if (source !== "torch_dist" && !full) continue;
			run(`elastic extract --load ${source} --choice choice.yaml --save ${source}-hf --to hf`);
			run(`elastic extract --load ${source} --choice choice.yaml --save ${source}-torch --to torch_dist`);
			run(`convert-ckpt --to native ${source}-torch ${source}-back`);
			losses.push(lossOf(`--load-hf ${source}-hf --bytes`), lossOf(`--load ${source}-back`));
		}
		losses.push(
			lossOf("--load native-native --llm-tp 2 --llm-ep 2"),
			lossOf("--load native-native --llm-dp 2 --llm-ep 2"),
		);
		for (const loss of losses) expect(Math.abs(loss / losses[0]! - 1)).toBeLessThan(1e-5);
	}, 180_000);

	test("the submodel is trained on, and plan says what it needs", () => {
		const own =
			"--hidden-size 48 --hybrid-layer-pattern MEM*E --mamba-num-heads-per-layer 6 4 --num-attention-heads 2 --num-experts-per-layer 4 6 --moe-ffn-hidden-size-per-layer 96 64";
		const { stdout } = run(`${training} ${own} --load native-native --finetune --train-iters 3`);
		expect(Number(/Trained 3 steps .*: loss ([\d.]+) → /.exec(stdout)![1])).toBeLessThan(1);
		type Plan = { modules: { parametersBytes?: number }[] };
		const bytes = (flags: string) =>
			JSON.stringify(JSON.parse(run(`plan ${model} --json ${flags}`.trim()).stdout) as Plan);
		expect(bytes("--choice choice.yaml")).toBe(bytes(own));
		expect(bytes("")).not.toBe(bytes(own));
	}, 60_000);

	test.each([
		["--choice none.yaml", "Cannot open the choice none.yaml: it does not exist."],
		["--choice wide.yaml", "wide.yaml: hidden-size is 128, larger than the parent's 64."],
		["", "mimo elastic extract needs either --choice FILE or --budget B."],
		[
			"--budget 0.5",
			"native/iter_0000060 has no elastic router: it is no checkpoint of a training with --flextron --enable-router.",
		],
		["--budget half", '--budget is "half"; allowed is a number greater than 0.'],
	])("%s is refused", (flags, sentence) => {
		folder.file("wide.yaml", "hidden-size: 128");
		const { exitCode, stderr } = mimo(
			`elastic extract --load native ${flags} --save refused`.trim().split(/ +/),
			folder.path,
		);
		expect([exitCode > 0, stderr]).toEqual([true, `mimo: ${sentence}\n`]);
	});
});

describe("rank", () => {
	/** Every score of a ranking. */
	function scores(file: string): number[] {
		const numbers = (value: unknown): number[] =>
			typeof value === "number"
				? [value]
				: typeof value === "object" && value !== null
					? Object.values(value).flatMap(numbers)
					: [];
		const { embedding, layers } = JSON.parse(readFileSync(`${folder.path}/${file}`, "utf8")) as Record<string, unknown>;
		return numbers([embedding, layers]);
	}

	const more = full ? ["--llm-dp 2 --llm-ep 2"] : [];
	test.each(["--llm-tp 2 --llm-ep 2", "--llm-dp 2 --llm-pp 2", ...more])(
		"is the same with %s",
		(layout) => {
			run(`elastic rank --load native --data text.txt --samples 8 --output other.json ${layout} ${deviceFlags}`);
			const [own, other] = [scores("ranking.json"), scores("other.json")];
			expect(other.length).toBe(own.length);
			for (const [i, score] of own.entries())
				expect(Math.abs(other[i]! - score)).toBeLessThan(1e-4 * Math.max(1, score));
		},
		60_000,
	);

	test("has a score for every unit of its layers", () => {
		const { layers, pattern, tokens } = JSON.parse(readFileSync(`${folder.path}/ranking.json`, "utf8"));
		expect([pattern, tokens, layers.length]).toEqual(["MEM*E-", 512, 6]);
		expect(layers[0].heads.length).toBe(8);
		expect([layers[1].experts.length, layers[1].channels.length, layers[1].channels[0].length]).toEqual([8, 8, 128]);
		expect(layers.every(({ layer }: { layer: number }) => layer > 0)).toBe(true);
	});

	test("--no-layers leaves the layers out", () => {
		const { stdout } = run(
			`elastic rank --load native --data text.txt --samples 4 --no-layers --output units.json ${deviceFlags}`,
		);
		expect(stdout).toBe("units.json: measured on 256 tokens.\n");
	});
});

describe("convert-ckpt --permute", () => {
	test("sorts every format and keeps the function", () => {
		const parent = lossOf("--load native");
		for (const source of sources) {
			run(`convert-ckpt --permute ranking.json --to native --verify ${source} sorted-${source}`);
			expect(Math.abs(lossOf(`--load sorted-${source}`) / parent - 1)).toBeLessThan(1e-6);
		}
		run("convert-ckpt --permute ranking.json --to hf --verify native sorted-folder");
		expect(Math.abs(lossOf("--load-hf sorted-folder --bytes") / parent - 1)).toBeLessThan(1e-6);
		run("convert-ckpt --permute ranking.json --to torch_dist --verify native sorted-megatron");
	}, 120_000);

	test("a submodel of the sorted parent is better than of one sorted the other way round", () => {
		const ranking = JSON.parse(readFileSync(`${folder.path}/ranking.json`, "utf8"));
		const falling = (_: string, value: unknown) => (typeof value === "number" ? 1e9 - value : value);
		const { embedding, layers } = JSON.parse(JSON.stringify(ranking), falling);
		writeFileSync(`${folder.path}/reversed.json`, JSON.stringify({ ...ranking, embedding, layers }));
		run("convert-ckpt --permute reversed.json --to native native reversed");
		for (const axis of ["hidden-size: 48", "mamba-num-heads: 4", "moe-ffn-hidden-size: 32"]) {
			folder.file("axis.yaml", axis);
			const [best, worst] = ["sorted-native", "reversed"].map((from) => {
				run(`elastic extract --load ${from} --choice axis.yaml --save axis-${from} --force`);
				return lossOf(`--load axis-${from}`);
			});
			expect([axis, best! < 0.95 * worst!]).toEqual([axis, true]);
		}
	}, 60_000);

	test("training goes on from the sorted checkpoint as from the other", () => {
		const heldOut = (from: string) =>
			/Held-out loss: ([\d.]+)/.exec(run(`${training} --load ${from} --train-iters 65`).stdout)![1];
		expect(heldOut("sorted-native")).toBe(heldOut("native"));
	}, 60_000);

	test("a ranking of another model is refused", () => {
		const ranking = JSON.parse(readFileSync(`${folder.path}/ranking.json`, "utf8"));
		writeFileSync(`${folder.path}/narrow.json`, JSON.stringify({ ...ranking, embedding: [1, 2] }));
		writeFileSync(`${folder.path}/broken.json`, JSON.stringify({ ...ranking, version: 2 }));
		const refused = (file: string) =>
			mimo(`convert-ckpt --permute ${file} --to hf native refused`.split(" "), folder.path).stderr;
		expect(refused("narrow.json")).toBe(
			"mimo: narrow.json ranks another model: it has 2 scores of embedding channels, the checkpoint 64.\n",
		);
		expect(refused("broken.json")).toStartWith("mimo: broken.json is no ranking of `mimo elastic rank` (version: ");
		expect(refused("none.json")).toBe("mimo: Cannot open the ranking none.json: it does not exist.\n");
	});
});

describe("a trained family", () => {
	const elastic =
		"--flextron --enable-router --emb-int-list 64 48 32 --mamba-int-list 8 6 4 --mlp-int-list 128 96 64 --moe-expert-int-list 8 6 4 --flex-hetero-mamba --budget-list 1 0.7 0.4 --moe-router-bias-update-rate 0 --lr-mult-router 10";

	beforeAll(() => {
		folder.file("other.txt", "the lazy dog runs over the quick brown fox and jumps away. ".repeat(12));
		const flags = "--valid-data-path other.txt --save family --save-interval 40 --eval-interval 20 --eval-iters 2";
		run(`${training} --train-iters 40 ${elastic} ${flags} --llm-tp 2 --llm-ep 2 --log-json family.jsonl`);
	}, 60_000);

	interface Row {
		readonly name: string;
		readonly total: number;
		readonly loss: number | null;
		readonly sizes: Readonly<Record<string, number>>;
	}
	const listed = (flags = "") =>
		JSON.parse(run(`elastic list --load family --json --log family.jsonl ${flags}`.trim()).stdout) as Row[];

	test("every budget's submodel has the loss of the parent that was masked on two ranks", () => {
		for (const { name, total, loss } of listed().slice(1)) {
			const budget = name.replace("budget ", "");
			const { stdout } = run(`elastic extract --load family --budget ${budget} --save family-${budget}`);
			expect(stdout).toContain(`${(total / 1e6).toFixed(2)} M of 0.51 M parameters`);
			const own = JSON.parse(run(`evaluate --load family-${budget} --data other.txt --json ${deviceFlags}`).stdout);
			expect(Math.abs(own.datasets[0].loss / loss! - 1)).toBeLessThan(1e-5);
		}
	}, 60_000);

	test("evaluate measures every budget without noise, on every layout, or one that is asked for", () => {
		const expected = listed().slice(1);
		const evaluated = (flags: string) =>
			(
				JSON.parse(run(`evaluate --load family --data other.txt --json ${deviceFlags} ${flags}`.trim()).stdout) as {
					datasets: { loss: number; budgets: { budget: number; loss: number }[] }[];
				}
			).datasets[0]!;
		const near = (a: number, b: number) => expect(Math.abs(a / b - 1)).toBeLessThan(1e-5);
		const whole = evaluated("");
		for (const { loss, budgets } of [whole, evaluated("--llm-tp 2 --llm-ep 2")]) {
			near(loss, whole.loss);
			expect(budgets.map(({ budget }) => `budget ${budget}`)).toEqual(expected.map(({ name }) => name));
			for (const [at, one] of budgets.entries()) near(one.loss, expected[at]!.loss!);
		}
		const alone = evaluated("--is-flex-eval --override-selected-budget 0.7");
		expect(alone.budgets.map(({ budget }) => budget)).toEqual([0.7]);
		near(alone.loss, expected[1]!.loss!);
		// Between two trained budgets.
		run("elastic extract --load family --budget 0.55 --save family-between");
		const between = evaluated("--is-flex-eval --override-selected-budget 0.55");
		near(between.loss, lossOf("--load family-between", "other.txt"));
		const { stdout } = run(`evaluate --load family --data other.txt ${deviceFlags}`);
		expect(stdout.split("\n")[0]).toMatch(/loss a token +at budget 1 +at budget 0.7 +at budget 0.4/);
	}, 60_000);

	test("list has a line for the parent, every budget and every choice, plan and evaluate take the parent", () => {
		const rows = listed("--choice choice.yaml");
		expect(rows.map(({ name }) => name)).toEqual(["parent", "budget 1", "budget 0.7", "budget 0.4", "choice.yaml"]);
		const [parent, , , small, chosen] = rows;
		expect(small!.total).toBeLessThan(parent!.total);
		expect(chosen!.sizes).toMatchObject({ "hidden-size": 48, layers: 5, "mamba-num-heads": 5, "num-experts": 5 });
		expect(lossOf("--load family")).toBeGreaterThan(0);
		const { stderr } = run("convert-ckpt --to hf family family-hf");
		expect(stderr).toBe("The elastic router of family/iter_0000040 is left out: the format has no place for it.\n");
		const { exitCode, stderr: refused } = mimo("elastic list --load native".split(" "), folder.path);
		expect([exitCode, refused]).toEqual([
			1,
			"mimo: native/iter_0000060 has no elastic router: it is no checkpoint of a training with --flextron --enable-router.\n",
		]);
	}, 30_000);

	test("the router goes to torch_dist under Megatron's names, and comes back", () => {
		run("convert-ckpt --to torch_dist --verify family family-td");
		using written = TorchDistFolder.open(resolveIteration(`${folder.path}/family-td`).folder);
		const keys = [...written.tensors.keys()].filter((key) => key.includes("gate_emb"));
		const gates = ["gate_emb.0.weight", "gate_emb.2.weight"];
		const states = ["exp_avg", "exp_avg_sq", "param"].map((state) => `optimizer.state.${state}.`);
		expect(keys.sort()).toEqual(
			[
				...gates.map((gate) => `router_pp0.${gate}`),
				...states.flatMap((state) => gates.map((gate) => `${state}router_pp0.${gate}`)),
			].sort(),
		);
		run("convert-ckpt --to native --verify family-td family-back");
		const values = (name: string) => {
			using checkpoint = NativeCheckpoint.open(`${folder.path}/${name}`);
			const digest = (tensor: string) => Bun.SHA256.hash(readTensor(checkpoint, tensor) as Uint8Array, "hex");
			return Object.fromEntries([...checkpoint.tensors.keys()].sort().map((tensor) => [tensor, digest(tensor)]));
		};
		expect(values("family-back")).toEqual(values("family"));
		for (const copy of ["family-td", "family-back"]) {
			expect(run(`elastic list --load ${copy}`).stdout).toBe(run("elastic list --load family").stdout);
		}
		const { stdout } = run(
			`${training} ${elastic} --train-iters 2 --load family-td --finetune --save resumed --log-interval 1`,
		);
		expect(stdout).toContain("budget loss");
	}, 60_000);

	test("report draws the family from the log", () => {
		run("report family.jsonl --output family.html");
		const page = readFileSync(`${folder.path}/family.html`, "utf8");
		expect(page).toContain("Family of submodels");
		expect(page).toContain("loss of every budget by step");
	});
});
