/**
 * Mutated inputs for everything that is parsed:
 *
 *   bun tests/fuzz/fuzz.ts [--parser NAME,…] [--cases N] [--seed S] [--seconds T] [--jobs J] [--output DIR]
 *   bun tests/fuzz/fuzz.ts --parser NAME --input FILE      one input that failed
 *   bun tests/fuzz/fuzz.ts --list
 *
 * N and T count for each parser. A case passes when its input is accepted or refused by one named error, within a bound of
 * time and memory; any other end fails, and its input is saved. The exit code is 1 when any failed.
 */
import { join } from "node:path";
import { parseArgs } from "node:util";
import { type FuzzResult, fuzz, loadParser, parsersIn, resultTable } from "./driver.ts";

const { values: flags } = parseArgs({
	options: {
		parser: { type: "string" },
		cases: { type: "string", default: "10000" },
		seed: { type: "string", default: "1" },
		seconds: { type: "string" },
		jobs: { type: "string", default: "1" },
		output: { type: "string", default: join(import.meta.dir, "../../build/fuzz") },
		input: { type: "string" },
		list: { type: "boolean", default: false },
	},
});

const parsers = parsersIn(join(import.meta.dir, "parsers"));
const wanted = flags.parser?.split(",") ?? [...parsers.keys()];
for (const name of wanted) if (!parsers.has(name)) throw new Error(`There is no parser ${name}; --list names them.`);

if (flags.list) {
	for (const [name, path] of parsers) console.log(`${name.padEnd(24)}${(await loadParser(path)).about}`);
} else {
	const options = {
		cases: Number(flags.cases),
		seed: Number(flags.seed),
		output: flags.output,
		...(flags.seconds === undefined ? {} : { seconds: Number(flags.seconds) }),
		...(flags.input === undefined ? {} : { input: flags.input }),
	};
	const results: FuzzResult[] = [];
	const queue = [...wanted];
	const work = async () => {
		for (let name = queue.shift(); name !== undefined; name = queue.shift()) {
			const result = await fuzz(name, parsers.get(name)!, options);
			results.push(result);
			for (const { index, reason, file } of result.failures) {
				console.error(`${name}, case ${index} of seed ${options.seed}: ${reason}${file === null ? "" : `\n  ${file}`}`);
			}
		}
	};
	await Promise.all(Array.from({ length: Number(flags.jobs) }, work));
	results.sort((a, b) => (a.parser < b.parser ? -1 : 1));
	for (const line of resultTable(results)) console.log(line);
	process.exitCode = results.some(({ failed }) => failed > 0) ? 1 : 0;
}
