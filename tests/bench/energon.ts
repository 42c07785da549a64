/** Reading a data set against the Python package: samples a second of one core's time, in turns. */
import { join } from "node:path";
import { median } from "../../src/observe/series.ts";
import { executable } from "../commands/mimo.ts";
import { golden } from "../golden.ts";
import { type Row, row } from "./measure.ts";

const rounds = 3;
const seconds = 6;

/** An interpreter that has megatron-energon: MIMO_PYTHON, or python3 on the PATH; null when there is none. */
export function findEnergon(): string | null {
	const python = process.env.MIMO_PYTHON ?? Bun.which("python3");
	if (!python) return null;
	return Bun.spawnSync([python, "-c", "import megatron.energon"]).success ? python : null;
}

/** A command's output, on the first core alone. */
function onOneCore(command: readonly string[]): string {
	const { success, stdout, stderr } = Bun.spawnSync(["taskset", "-c", "0", ...command], { stderr: "pipe" });
	if (!success) throw new Error(`${command.join(" ")} failed:\n${stderr}`);
	return stdout.toString().trim();
}

export function benchEnergon(python: string): Row[] {
	const folder = golden("energon");
	const path = join(folder, "datasets/captions");
	return (["raw", "decoded"] as const).map((mode) => {
		const flags = ["--workers", "1", "--seconds", String(seconds), "--json", ...(mode === "raw" ? ["--raw"] : [])];
		const script = join(import.meta.dir, "energon_reference.py");
		const [ours, theirs]: [number[], number[]] = [[], []];
		for (let round = 0; round < rounds; round++) {
			ours.push(JSON.parse(onOneCore([executable, "data", "bench", path, ...flags])).samplesPerCoreSecond);
			theirs.push(
				Number(
					onOneCore([python, script, path, mode, String(seconds)])
						.split("\n")
						.at(-1),
				),
			);
		}
		const what = { group: "data", operation: `${mode} samples`, shape: "captions", threads: 1 };
		const target = mode === "raw" ? 10 : 1.5;
		return row({ ...what, baseline: "megatron-energon", target }, [1 / median(ours), 1 / median(theirs)]);
	});
}
