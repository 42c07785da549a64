/** `mimo launch kubernetes`: prints the manifests of a training, to be piped to `kubectl apply -f -`. */
import { basename } from "node:path";
import { stringify } from "yaml";
import { fileFolder, manifestsOf, type PodRun, podRunKinds } from "../../launch/kubernetes.ts";
import { print } from "../../observe/output.ts";
import { topologyOf } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { readWholeText } from "../../system/input-file.ts";
import { configurationOfArguments, configuredCommand, flagError, takeRepeated } from "../arguments.ts";

const help = `mimo launch kubernetes --image IMAGE@sha256:… [FLAGS] [FLAGS OF mimo train]

  --image NAME         Image of mimo by its digest.
  --name NAME          Name of the run's objects; default: mimo.
  --namespace NAME     Their namespace.
  --kind KIND          jobset (default), trainjob: Kubeflow's, with a runtime, or job: an indexed Job and its headless service.
  --queue NAME         Kueue's local queue: all pods are admitted together.
  --gpus-per-node N    GPUs, and so ranks, of a pod; default 8.
  --resource NAME=N    A further resource of a pod, such as rdma/ib=8; may be repeated.
  --shm SIZE           Size of /dev/shm; default 64Gi.
  --secret NAME        Secret with the key "secret", by which ranks of several pods know each other.
  --env-from NAME      Secret whose keys become variables, such as AWS_ACCESS_KEY_ID; may be repeated.
  --volume CLAIM:PATH  Persistent volume claim, and where it is mounted; may be repeated.
  --job-restarts N     Restarts of the whole run after failures; default 3.
  --grace-seconds N    Seconds that a pod has to save when it is asked to end; default 600.

The file of --config travels along in a ConfigMap; paths in it are those of the pods.`;

const single = {
	...{ image: true, name: true, namespace: true, kind: true, queue: true, "gpus-per-node": true },
	...{ shm: true, secret: true, "job-restarts": true, "grace-seconds": true },
} as const;
const repeated = ["resource", "env-from", "volume"] as const;
const ownFlags = { ...single, ...Object.fromEntries(repeated.map((name) => [name, true] as const)) };

const dnsLabel = /^[a-z0-9]([-a-z0-9]*[a-z0-9])?$/;
/** Longest name of a run: its pods' names, with role and index, are labels of at most 63 characters. */
const LONGEST_NAME = 40;
/** Bytes of the largest configuration file: a ConfigMap has at most 1 MiB. */
const LARGEST_FILE = 2 ** 19;

export default configuredCommand({
	name: "kubernetes",
	description: "Print the manifests of a training on Kubernetes.",
	help,
	ownFlags,
	run: async (args) => {
		const own = takeFlags(args);
		const { configuration: c } = configurationOfArguments(own.rest);
		const { worldSize } = topologyOf(c);
		const perNode = own.count("gpus-per-node", 8, 1);
		const { nodes, ranksPerNode } = nodesOf(worldSize, perNode);
		if (nodes > 1 && c.device === "cpu") throw new UserError("device cpu: ranks of the CPU library are on one host.");
		const secret = own.text("secret");
		if (nodes > 1 && secret === null) {
			throw new UserError(
				`A run of ${nodes} pods needs a secret: \`kubectl create secret generic NAME --from-literal secret=…\`, and --secret NAME.`,
				exitCodes.usage,
			);
		}
		const { file, rest } = withFile(own.rest);
		const run: PodRun = {
			kind: own.kind(),
			name: own.name("name") ?? "mimo",
			namespace: own.name("namespace"),
			queue: own.name("queue"),
			image: imageOf(own.text("image")),
			arguments: ["train", ...rest],
			...{ nodes, ranksPerNode, file, secret },
			gpus: c.device === "cpu" ? 0 : ranksPerNode,
			resources: Object.fromEntries(own.lists.resource!.map((text) => pairOf("resource", text, "="))),
			sharedMemory: own.text("shm") ?? "64Gi",
			variables: own.lists["env-from"]!,
			volumes: own.lists.volume!.map((text) => {
				const [claim, path] = pairOf("volume", text, ":");
				if (!path.startsWith("/")) throw flagError("volume", text, "CLAIM:/PATH");
				return { claim, path };
			}),
			restarts: own.count("job-restarts", 3, 0),
			gracePeriod: own.count("grace-seconds", 600, 0),
		};
		print(
			manifestsOf(run)
				.map((object) => stringify(object, { aliasDuplicateObjects: false }))
				.join("---\n")
				.trimEnd(),
		);
	},
});

/** Separates the command's own flags from those of `mimo train`. */
function takeFlags(args: readonly string[]) {
	let rest = args;
	const lists: Record<string, readonly string[]> = {};
	for (const name of Object.keys(ownFlags)) {
		const taken = takeRepeated(rest, name);
		lists[name] = taken.values;
		rest = taken.rest;
	}
	const text = (name: keyof typeof single) => lists[name]!.at(-1) ?? null;
	return {
		...{ rest, lists, text },
		count: (name: keyof typeof single, missing: number, least: number) => {
			const given = text(name);
			if (given === null) return missing;
			if (!/^\d{1,9}$/.test(given) || Number(given) < least) throw flagError(name, given, `an integer from ${least}`);
			return Number(given);
		},
		name: (flag: keyof typeof single) => {
			const given = text(flag);
			if (given !== null && (!dnsLabel.test(given) || given.length > LONGEST_NAME)) {
				throw flagError(flag, given, `a name of small letters, digits and -, at most ${LONGEST_NAME} characters`);
			}
			return given;
		},
		kind: () => {
			const given = text("kind") ?? "jobset";
			const kind = podRunKinds.find((one) => one === given);
			if (kind === undefined) throw flagError("kind", given, podRunKinds.join(", "));
			return kind;
		},
	};
}

function nodesOf(worldSize: number, perNode: number): { readonly nodes: number; readonly ranksPerNode: number } {
	if (worldSize <= perNode) return { nodes: 1, ranksPerNode: worldSize };
	if (worldSize % perNode === 0) return { nodes: worldSize / perNode, ranksPerNode: perNode };
	throw new UserError(
		`--gpus-per-node ${perNode}: the configured grids have ${counted(worldSize, "rank")}, which do not fill such pods.`,
		exitCodes.usage,
	);
}

/** Pods that start later must not get another program. */
function imageOf(given: string | null): string {
	if (given !== null && /^[^\s@]+@sha256:[0-9a-f]{64}$/.test(given)) return given;
	throw flagError("image", given ?? "", "an image by its digest, NAME@sha256:…");
}

function pairOf(flag: string, text: string, separator: string): readonly [string, string] {
	const at = text.indexOf(separator);
	if (at < 1 || at === text.length - 1) throw flagError(flag, text, `NAME${separator}VALUE`);
	return [text.slice(0, at), text.slice(at + 1)];
}

/** The file of --config, and the arguments with its place in the pods. */
function withFile(args: readonly string[]): { readonly file: PodRun["file"]; readonly rest: readonly string[] } {
	const { values, rest } = takeRepeated(args, "config");
	const path = values.at(-1);
	if (path === undefined) return { file: null, rest };
	const name = basename(path);
	return {
		file: { name, text: readWholeText(path, LARGEST_FILE) },
		rest: ["--config", `${fileFolder}/${name}`, ...rest],
	};
}
