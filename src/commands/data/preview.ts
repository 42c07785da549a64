/** `mimo data preview`: shows samples as a training configuration would train on them. */
import { defineCommand } from "citty";
import type { EncodedSample } from "../../data/vision-language/batch.ts";
import { firstWarning } from "../../observe/messages.ts";
import { print } from "../../observe/output.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { configurationOfArguments, flagError } from "../arguments.ts";

const help = `mimo data preview [--preset NAME] [--config FILE.yaml] [FLAGS] --data-path PATH

  Shows the first samples as tokens: those that count in the loss, image sizes and the places of image rows. Takes the flags
  of mimo train.

  --samples N   Number of samples; default 4.
  --html FILE   Write a page with the images as the encoder gets them instead.`;

/** Flags that are not configuration keys, and whether they take a value. */
const ownFlags = { samples: true, html: true } as const;

const command = defineCommand({
	meta: { name: "preview", description: "Show samples as training takes them." },
	run: async ({ rawArgs }) => {
		if (rawArgs.includes("--help") || rawArgs.includes("-h")) {
			print(help);
			return;
		}
		const { configuration: c, command } = configurationOfArguments(rawArgs, ownFlags, { trains: false });
		const count = command.samples ?? "4";
		if (!/^[1-9]\d{0,5}$/.test(count)) {
			throw flagError("samples", count, "an integer from 1 to 999999");
		}
		if (c.datasetProvider !== "energon") {
			throw new UserError("Only Energon data can be previewed: give --data-path a prepared data set.", exitCodes.usage);
		}
		const { oneRank, sourceOptions } = await import("../../data/routing/from-configuration.ts");
		const { previewSamples } = await import("../../data/vision-language/preview.ts");
		const { taskOf } = await import("../../data/vision-language/from-configuration.ts");
		const { openStorage } = await import("../../data/energon/storage/open.ts");
		const { configuredTokenizer } = await import("../../data/text/configured-tokenizer.ts");
		const { Images } = await import("../../native/images.ts");
		const { openLibrary } = await import("../../native/library.ts");
		const { configuration } = sourceOptions(c, oneRank);
		const tokenizer = configuredTokenizer(c);
		const task = taskOf(c);
		const images = new Images(await openLibrary("cpu"));
		const failures: string[] = [];
		let samples: readonly EncodedSample[];
		try {
			samples = previewSamples(openStorage(configuration.storage), images, tokenizer, {
				...configuration,
				task,
				count: Number(count),
				onFailure: (error) => failures.push(error.message),
				remark: firstWarning(),
			});
		} finally {
			reportFailures(failures);
		}
		if (command.html !== undefined) {
			const { previewPage } = await import("../../data/vision-language/preview.ts");
			await Bun.write(command.html, previewPage(samples, tokenizer, task, images));
			print(`${counted(samples.length, "sample")} in ${command.html}`);
			return;
		}
		const { headline, imageLines, spansOf } = await import("../../data/vision-language/preview.ts");
		const { dataSentences } = await import("../../train/report/run-text.ts");
		print(`${dataSentences(c).join("\n")}\n`);
		const mark = process.stdout.isTTY ? ["\u001b[32m", "\u001b[0m"] : ["[", "]"];
		for (const sample of samples) {
			const spans = spansOf(sample, tokenizer, task);
			const text = spans.map((span) => {
				if ("image" in span) return `<image ${span.image}: ${counted(span.rows, "row")}>`;
				return span.loss ? `${mark[0]}${span.text}${mark[1]}` : span.text;
			});
			print(headline(sample, task.sequenceLength));
			for (const line of imageLines(sample, spans, task.tower)) print(`  ${line}`);
			print(`  ${text.join("").replaceAll("\n", "\n  ")}\n`);
		}
	},
});
export default { ...command, ownFlags };

function reportFailures(failures: readonly string[]): void {
	if (failures.length === 0) return;
	const count = failures.length === 1 ? "1 sample was" : `${failures.length} samples were`;
	process.stderr.write(`${count} left out, the last because: ${failures.at(-1)}\n`);
}
