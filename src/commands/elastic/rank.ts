/** `mimo elastic rank`: measures on data how important the units of a model are. */
import { print } from "../../observe/output.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { configurationOfArguments, configuredCommand, countFlag, takeRepeated } from "../arguments.ts";

const help = `mimo elastic rank --load FOLDER | --load-hf FOLDER --data PATH... --output FILE [FLAGS]

Measures how important the units of a trained model are: embedding channels and channels of experts by the size of their
activations, Mamba and query heads by the size of their outputs, experts by their outputs times the router's weights, layers
by how far the model's output moves without them. \`mimo convert-ckpt --permute FILE\` sorts a checkpoint by it.

  --data PATH          Text, .safetensors with tokens, or Energon data, as \`mimo evaluate\` takes it. May be given several times.
  --output FILE        The ranking, JSON.
  --samples N          Most samples of a data set. Default 128.
  --no-layers          Leave out the ranking of layers, which runs every sample once more for each layer.
  --nproc N            Ranks on this host; without it, as many as the configured grids need.`;

const ownFlags = { samples: true, output: true, "no-layers": false, nproc: true };

export default configuredCommand({
	name: "rank",
	description: "Measure how important a model's channels, heads, experts and layers are.",
	help,
	ownFlags: { ...ownFlags, data: true },
	run: async (args) => {
		const { checkpointEntries } = await import("../../inference/checkpoint-model.ts");
		const data = takeRepeated(args, "data");
		const resolved = configurationOfArguments(data.rest, ownFlags, { trains: false, beneath: checkpointEntries });
		const { configuration: c, command: flags } = resolved;
		const { output } = flags;
		if (data.values.length === 0 || output === undefined) {
			throw new UserError("mimo elastic rank needs --data PATH and --output FILE.", exitCodes.usage);
		}
		if (c.llmCp > 1) throw new UserError(`--llm-cp ${c.llmCp}: allowed here is 1.`, exitCodes.usage);
		if (c.llmExptTp > 1) {
			throw new UserError(
				`--llm-expt-tp ${c.llmExptTp}: ranks that cut an expert's channels have no whole output of it; --llm-ep spreads experts.`,
				exitCodes.usage,
			);
		}
		const job = {
			data: data.values,
			samples: countFlag(flags, "samples", 128),
			layers: !("no-layers" in flags),
		};
		const { runRank } = await import("../../inference/run-importance.ts");
		const { entriesOf } = await import("../../inference/losses.ts");
		const { checkRankCount, onEveryRank, rankOptions, startsTheRun } = await import("../ranks.ts");
		const { topologyOf } = await import("../../parallel/topology.ts");
		const topology = topologyOf(c);
		checkRankCount(topology, flags.nproc);
		if (startsTheRun()) entriesOf(c, job.data);
		const reporter = topology.language.lane(0, 0)[0]!;
		await onEveryRank({ ...rankOptions(c, topology, reporter), quiet: true }, async (world) => {
			const importance = await runRank(c, job, world);
			if (importance === null) return;
			const { formatImportance, layerRanking } = await import("../../guests/elastic/importance/importance.ts");
			const { writeFileAtomically } = await import("../../checkpoint/files.ts");
			const text = new TextEncoder().encode(formatImportance(importance));
			writeFileAtomically(output, (file) => file.write(text), { sync: false });
			const ranking = layerRanking(importance);
			print(`${output}: measured on ${counted(importance.tokens, "token")}.`);
			if (ranking !== null) print(`Layers, the least important first: ${ranking.join(", ")}.`);
		});
	},
});
