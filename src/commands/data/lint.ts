/** `mimo data lint`: reads a whole data set and reports every problem; exit code 1 if there is any. */
import { defineCommand } from "citty";
import type { Sample } from "../../data/energon/sample.ts";
import { print } from "../../observe/output.ts";
import { shownAddress } from "../../system/addresses.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { datasetPath, redirectsFlag } from "../arguments.ts";

const help = `mimo data lint PATH [--json] [--data-private-redirects] [--preset NAME] [--config FILE.yaml] [FLAGS]

  Checks indexes, decodes every sample of a prepared folder, JSONL file or metadataset, and reports what training cannot
  use: placeholders without an image, turns without a role, empty answers. With flags of mimo train, also samples and
  images that are cut off at --seq-length. Exit code 1 with any problem.

  --json   A line of JSON for every problem.`;

const command = defineCommand({
	meta: { name: "lint", description: "Check indexes and decode every sample; exit code 1 with any problem." },
	run: async ({ rawArgs }) => {
		if (rawArgs.includes("--help") || rawArgs.includes("-h")) {
			print(help);
			return;
		}
		const json = rawArgs.includes("--json");
		const privateRedirects = rawArgs.includes(`--${redirectsFlag}`);
		const [given, ...flags] = rawArgs.filter((argument) => !["--json", `--${redirectsFlag}`].includes(argument));
		if (given === undefined || given.startsWith("-")) {
			throw new UserError(
				"mimo data lint takes a PATH first: a prepared folder, .jsonl file or metadataset.",
				exitCodes.usage,
			);
		}
		const path = datasetPath(given);
		const { lint } = await import("../../data/energon/tools/lint.ts");
		const { openStorage } = await import("../../data/energon/storage/open.ts");
		const { inspectImage } = await import("../../data/vision-language/pixels.ts");
		const { Images } = await import("../../native/images.ts");
		const { openLibrary } = await import("../../native/library.ts");
		const check = flags.length === 0 ? null : await fitCheck(path, flags);
		const images = new Images(await openLibrary("cpu"));
		const storage = openStorage({ cacheFolder: null, cacheBytes: 0, privateRedirects });
		const decode = (bytes: Uint8Array) => {
			images.decode(bytes);
			return inspectImage(images, bytes);
		};
		const result = lint(storage, path, { images: decode, check }, (problem) => {
			const { where, key, what } = problem;
			print(shownAddress(json ? JSON.stringify(problem) : `${where}${key === null ? "" : ` ${key}`}: ${what}`));
		});
		const { shards, samples, bad, problems } = result;
		const summary = `${counted(samples, "sample")} in ${counted(shards, "shard")}, ${counted(bad, "bad sample")}, ${counted(problems, "problem")}`;
		if (json) process.stderr.write(`${summary}\n`);
		else print(summary);
		if (problems > 0) process.exitCode = exitCodes.failure;
	},
});
export default { ...command, ownFlags: { json: false, [redirectsFlag]: false } };

/** Returns a check that describes the part of a sample that a training configuration would cut off; null: no part. */
async function fitCheck(path: string, flags: readonly string[]): Promise<(sample: Sample) => string | null> {
	const { resolveConfiguration } = await import("../../config/resolve.ts");
	const { configuration: c } = resolveConfiguration([...flags, "--data-path", path], {}, { trains: false });
	const { taskOf } = await import("../../data/vision-language/from-configuration.ts");
	const { cutOff } = await import("../../data/vision-language/dataset-checks.ts");
	const { configuredTokenizer } = await import("../../data/text/configured-tokenizer.ts");
	const tokenizer = configuredTokenizer(c);
	return cutOff(taskOf(c), tokenizer);
}
