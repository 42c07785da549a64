/** `mimo data lint`: reads everything, reports every problem; exit code 1 when there is one. */
import { defineCommand } from "citty";
import { exitCodes } from "../../native/exit-codes.ts";
import { datasetPath, pathArgument } from "./dataset-path.ts";

const args = {
	path: pathArgument,
	json: { type: "boolean", description: "A line of JSON for every problem." },
} as const;

export default defineCommand({
	meta: { name: "lint", description: "Check indexes and decode every sample; exit 1 when anything is damaged." },
	args,
	run: async ({ args: given }) => {
		const { lint } = await import("../../data/energon/tools/lint.ts");
		const { openStorage } = await import("../../data/energon/storage/open.ts");
		const { Images } = await import("../../native/images.ts");
		const { openLibrary } = await import("../../native/library.ts");
		const images = new Images(await openLibrary("cpu"));
		const storage = openStorage({ cacheFolder: null, cacheBytes: 0 });
		const path = datasetPath(given.path);
		const result = lint(
			storage,
			path,
			(bytes) => images.decode(bytes),
			(problem) => {
				const { where, key, what } = problem;
				console.log(given.json ? JSON.stringify(problem) : `${where}${key === null ? "" : ` ${key}`}: ${what}`);
			},
		);
		const { shards, samples, bad, problems } = result;
		const summary = `${samples} samples in ${shards} shards, ${bad} bad samples, ${problems} problems`;
		if (given.json) process.stderr.write(`${summary}\n`);
		else console.log(summary);
		if (problems > 0) process.exitCode = exitCodes.failure;
	},
});
