/**
 * Experts' rows of 8192 tokens over four ranks, there and back: planned by the device against planned by the host.
 *
 *   bun tests/bench/expert-exchange.ts [RANKS [TOKENS OF A RANK]]     by itself; on GPUs as tests run there
 */
import { runRanks } from "../parallel/ranks.ts";
import { type Row, row, tables } from "./measure.ts";

const sizes = { topk: 6, experts: 128, width: 2688 };

export async function benchExpertExchange(ranks = 4, tokens = 8192 / ranks): Promise<Row[]> {
	const { topk, experts, width } = sizes;
	const outcomes = await runRanks(
		"../bench/expert-exchange-rank.ts",
		ranks,
		[tokens, topk, experts, width].map(String),
	);
	const failed = outcomes.find(({ exitCode }) => exitCode !== 0);
	if (failed) throw new Error(`expert-exchange-rank.ts failed:\n${failed.stderr}`);
	const seconds = JSON.parse(outcomes[0]!.stdout) as Record<"planned" | "byHost" | "copies", number>;
	const rows = 2 * ranks * tokens * topk;
	const rate = (one: number) => `${(rows / one / 1e6).toFixed(2)} M rows/s`;
	const about = {
		group: `experts' rows of ${ranks * tokens} tokens over ${ranks} ranks, there and back`,
		shape: `${topk} rows of ${width} bf16 a token`,
		threads: 1,
	};
	return [
		row(
			{
				...about,
				operation: `exchange, ${rate(seconds.planned)}`,
				baseline: `by host, ${rate(seconds.byHost)}`,
				target: 2,
			},
			[seconds.planned, seconds.byHost],
		),
		row({ ...about, operation: "exchange", baseline: `memcpy, ${rate(seconds.copies)}`, target: null }, [
			seconds.planned,
			seconds.copies,
		]),
	];
}

if (import.meta.main) {
	const [ranks, tokens] = process.argv.slice(2).map(Number);
	console.log(tables(await benchExpertExchange(ranks, tokens)));
}
