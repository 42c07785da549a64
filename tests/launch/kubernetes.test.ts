/**
 * `mimo launch kubernetes` against the published schemas, and hosts that start their ranks by the variables which its pods have.
 * kubernetes-schemas.json holds the parts of the schemas that the manifests use, where every other field is refused: of JobSet's CRD
 * (github.com/kubernetes-sigs/jobset, 08dfbdfd, config/components/crd/bases), of Kubeflow Trainer's (github.com/kubeflow/trainer,
 * 8c0f5059, manifests/base/crds) and of Kubernetes 1.37 (PyPI's kubernetes-validate 1.37.0), all under the Apache License 2.0.
 */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseAllDocuments } from "yaml";
import { nodeFromEnvironment } from "../../src/launch/node.ts";
import { executable, mimo } from "../commands/mimo.ts";
import { loggedSteps, SmallRun } from "../e2e/small-run.ts";
import schemas from "./kubernetes-schemas.json";

interface Schema {
	readonly type?: string | readonly string[];
	readonly properties?: Readonly<Record<string, Schema>>;
	readonly additionalProperties?: Schema | false;
	readonly items?: Schema;
	readonly required?: readonly string[];
	readonly enum?: readonly unknown[];
	readonly oneOf?: readonly Schema[];
	readonly minimum?: number;
	readonly maximum?: number;
	readonly minLength?: number;
	readonly maxLength?: number;
	readonly pattern?: string;
	readonly "x-kubernetes-int-or-string"?: boolean;
}

const isOf = (value: unknown, type: string) =>
	type === "integer"
		? Number.isInteger(value)
		: type === "array"
			? Array.isArray(value)
			: type === "object"
				? typeof value === "object" && value !== null && !Array.isArray(value)
				: typeof value === type;

/** What a value breaks of a schema, with the place. */
function faults(value: unknown, schema: Schema, at: string): string[] {
	const found: string[] = [];
	const types = schema.type === undefined ? [] : [schema.type].flat();
	if (types.length > 0 && !types.some((type) => isOf(value, type))) return [`${at} is no ${types.join(" or ")}`];
	if (schema["x-kubernetes-int-or-string"] && !isOf(value, "integer") && !isOf(value, "string"))
		found.push(`${at} is neither integer nor text`);
	if (schema.enum && !schema.enum.includes(value)) found.push(`${at} is ${value}`);
	if (schema.oneOf && schema.oneOf.filter((one) => faults(value, one, at).length === 0).length !== 1)
		found.push(`${at} is not one of its kinds`);
	if (typeof value === "number" && !(value >= (schema.minimum ?? -Infinity) && value <= (schema.maximum ?? Infinity)))
		found.push(`${at} is ${value}`);
	if (typeof value === "string") {
		if (value.length < (schema.minLength ?? 0) || value.length > (schema.maxLength ?? Infinity))
			found.push(`${at} has ${value.length} characters`);
		if (schema.pattern !== undefined && !new RegExp(schema.pattern).test(value))
			found.push(`${at} does not match ${schema.pattern}`);
	}
	if (Array.isArray(value) && schema.items) {
		for (const [index, item] of value.entries()) found.push(...faults(item, schema.items, `${at}[${index}]`));
	} else if (isOf(value, "object")) {
		const fields = value as Readonly<Record<string, unknown>>;
		for (const name of schema.required ?? []) if (!(name in fields)) found.push(`${at} has no ${name}`);
		for (const [name, field] of Object.entries(fields)) {
			const known =
				schema.properties && Object.hasOwn(schema.properties, name)
					? schema.properties[name]!
					: schema.additionalProperties;
			if (known === false) found.push(`${at} has an unknown ${name}`);
			else if (known) found.push(...faults(field, known, `${at}.${name}`));
		}
	}
	return found;
}

// biome-ignore lint/suspicious/noExplicitAny: manifests of any kind
type Manifest = any;

const ofJobSet: Schema = { type: "object", properties: { spec: schemas.JobSet.properties.spec as Schema } };

/** The manifests that a command prints, each checked against its schema. */
function manifests(args: readonly string[], cwd = "."): Manifest[] {
	const { exitCode, stdout, stderr } = mimo(["launch", "kubernetes", ...args], cwd);
	expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	const all: Manifest[] = parseAllDocuments(stdout).map((document) => document.toJS());
	for (const one of all) {
		expect(faults(one, (schemas as Readonly<Record<string, Schema>>)[one.kind]!, one.kind)).toEqual([]);
		// A runtime holds the specification of a JobSet.
		if (one.kind === "TrainingRuntime") expect(faults(one.spec.template, ofJobSet, one.kind)).toEqual([]);
	}
	return all;
}

const folder = mkdtempSync(join(tmpdir(), "mimo-kubernetes-"));
afterAll(() => rmSync(folder, { recursive: true }));
const grids =
	"preset: nemotron-vlm-tiny\ndevice: cuda\nllm-dp: 12\nencoder-dp: 4\nmicro-batch-size: 1\nglobal-batch-size: 96\n";
writeFileSync(join(folder, "run.yaml"), grids);
const image = `registry.example/mimo@sha256:${"0123456789abcdef".repeat(4)}`;
const several = `--name run-1 --image ${image} --queue team-a --namespace ml --resource rdma/ib=8 --secret key --env-from s3 --volume data:/data --config run.yaml --train-iters 10`;

test("the checks of schemas find what is wrong", () => {
	const service = {
		apiVersion: "v1",
		kind: "Service",
		metadata: { name: "a" },
		spec: { ports: [{ port: "x", prot: 1 }] },
	};
	expect(faults(service, schemas.Service as Schema, "Service")).toEqual([
		"Service.spec.ports[0].port is no integer",
		"Service.spec.ports[0] has an unknown prot",
	]);
	expect(
		faults({ kind: "JobSet", spec: { failurePolicy: { rules: [{ name: "a" }] } } }, schemas.JobSet as Schema, "JobSet"),
	).toEqual(["JobSet.spec.failurePolicy.rules[0] has no action"]);
});

test("a JobSet has as many pods as hosts, Kueue's queue, a secret, and the name of the first pod", () => {
	const [file, set] = manifests(several.split(" "), folder);
	expect(file.data).toEqual({ "run.yaml": grids });
	expect([set.apiVersion, set.kind, set.metadata]).toEqual([
		"jobset.x-k8s.io/v1alpha2",
		"JobSet",
		{ name: "run-1", namespace: "ml", labels: { "kueue.x-k8s.io/queue-name": "team-a" } },
	]);
	const { spec } = set.spec.replicatedJobs[0].template;
	expect([spec.parallelism, spec.completions, spec.completionMode, spec.backoffLimit]).toEqual([2, 2, "Indexed", 0]);
	const [container] = spec.template.spec.containers;
	expect(container.image).toBe(image);
	expect(container.args).toEqual(["train", "--config", "/etc/mimo/run.yaml", "--train-iters", "10"]);
	expect(container.resources.limits).toEqual({ "nvidia.com/gpu": 8, "rdma/ib": "8" });
	const variables = Object.fromEntries(container.env.map(({ name, value }: Manifest) => [name, value]));
	expect(variables).toMatchObject({ NNODES: "2", NPROC_PER_NODE: "8", MASTER_ADDR: "run-1-ranks-0-0.run-1" });
	expect(nodeFromEnvironment({ ...variables, JOB_COMPLETION_INDEX: "1" })).toEqual({
		...{ node: 1, nodes: 2, ranksPerNode: 8 },
		...{ address: "run-1-ranks-0-0.run-1", port: 29500 },
	});
	expect(spec.template.spec.volumes[0]).toEqual({ name: "shm", emptyDir: { medium: "Memory", sizeLimit: "64Gi" } });
	const mounted = container.volumeMounts.map(({ name }: Manifest) => name);
	expect(mounted.toSorted()).toEqual(spec.template.spec.volumes.map(({ name }: Manifest) => name).toSorted());
});

test("a TrainJob has a runtime of its own, whose JobSet is as one without Kubeflow but for the names that its Trainer looks for", () => {
	const [file, runtime, job, ...rest] = manifests([...several.split(" "), "--kind", "trainjob"], folder);
	const [, set] = manifests(several.split(" "), folder);
	expect([file.kind, rest]).toEqual(["ConfigMap", []]);
	expect(job).toEqual({
		apiVersion: "trainer.kubeflow.org/v1alpha1",
		kind: "TrainJob",
		metadata: set.metadata,
		spec: {
			runtimeRef: { apiGroup: "trainer.kubeflow.org", kind: "TrainingRuntime", name: "run-1" },
			trainer: { numNodes: 2 },
		},
	});
	expect([runtime.metadata, runtime.spec.mlPolicy]).toEqual([{ name: "run-1", namespace: "ml" }, { numNodes: 2 }]);
	const renamed = JSON.stringify(set.spec)
		.replaceAll("run-1-ranks-", "run-1-node-")
		.replaceAll('"name":"ranks"', '"name":"node"')
		.replaceAll('"name":"mimo"', '"name":"node"')
		.replaceAll('"containerName":"mimo"', '"containerName":"node"');
	const { template, ...replicated } = JSON.parse(renamed).replicatedJobs[0];
	const labels = { "trainer.kubeflow.org/trainjob-ancestor-step": "trainer" };
	expect(runtime.spec.template.spec).toEqual({
		...JSON.parse(renamed),
		replicatedJobs: [{ ...replicated, template: { metadata: { labels }, ...template } }],
	});
});

test("a plain Job has its headless service, and a run of one pod needs no secret", () => {
	const [, service, job] = manifests([...several.split(" "), "--kind", "job", "--job-restarts", "2"], folder);
	expect(service.spec).toMatchObject({ clusterIP: "None", publishNotReadyAddresses: true });
	expect([job.kind, job.spec.backoffLimit, job.spec.template.spec.subdomain]).toEqual([
		"Job",
		4,
		service.metadata.name,
	]);
	expect(job.spec.template.spec.containers[0].env[2].value).toBe(`run-1-0.${service.metadata.name}`);
	const [single, ...rest] = manifests(["--image", image, "--preset", "nemotron-tiny", "--device", "cpu"]);
	expect(rest).toEqual([]);
	expect(single.spec.replicatedJobs[0].template.spec.parallelism).toBe(1);
});

const tiny = "--preset nemotron-tiny";

test.each([
	[`--image mimo:latest ${tiny}`, '--image is "mimo:latest"; allowed is an image by its digest, NAME@sha256:….'],
	[
		`--image ${image} ${tiny} --name Run_1`,
		'--name is "Run_1"; allowed is a name of small letters, digits and -, at most 40 characters.',
	],
	[`--image ${image} ${tiny} --volume data`, '--volume is "data"; allowed is NAME:VALUE.'],
	[`--image ${image} ${tiny} --kind pod`, '--kind is "pod"; allowed is jobset, trainjob, job.'],
	[`--image ${image} --config run.yaml`, "A run of 2 pods needs a secret"],
	[
		`--image ${image} --config run.yaml --gpus-per-node 6`,
		"--gpus-per-node 6: the configured grids have 16 ranks, which do not fill such pods.",
	],
])("%s is refused", (flags, sentence) => {
	const { exitCode, stdout, stderr } = mimo(["launch", "kubernetes", ...flags.split(" ")], folder);
	expect({ exitCode, stdout }).toEqual({ exitCode: 2, stdout: "" });
	expect(stderr).toContain(sentence);
});

test("variables: an index of Kubernetes, names of Kubeflow's Trainer, and those that are no host's", () => {
	const pet = {
		PET_NNODES: "4",
		PET_NPROC_PER_NODE: "2",
		PET_NODE_RANK: "3",
		PET_MASTER_ADDR: "a.b",
		PET_MASTER_PORT: "1234",
	};
	expect(nodeFromEnvironment(pet)).toEqual({ node: 3, nodes: 4, ranksPerNode: 2, address: "a.b", port: 1234 });
	expect(nodeFromEnvironment({ NNODES: "2" })).toBeNull();
	const base = { NNODES: "2", NPROC_PER_NODE: "2", MASTER_ADDR: "a", MASTER_PORT: "29500" };
	expect(nodeFromEnvironment({ ...base, RANK: "0", WORLD_SIZE: "4" })).toBeNull();
	expect(() => nodeFromEnvironment(base)).toThrow(
		"The environment has NNODES and no NODE_RANK; it needs an integer from 0 to 1.",
	);
	expect(() => nodeFromEnvironment({ ...base, NODE_RANK: "2" })).toThrow(
		"NODE_RANK=2; it needs an integer from 0 to 1.",
	);
});

test("two hosts' processes start their ranks, which train as those of one launcher do; a failure ends both", async () => {
	using run = new SmallRun();
	const flags = (log: string, more: string) =>
		`train --preset nemotron-tiny --hidden-size 64 --seq-length 64 --device cpu --data-path text.txt --llm-dp 2 --train-iters 2 --log-json ${log} ${more}`
			.trim()
			.split(" ");
	expect(mimo(flags("one.jsonl", ""), run.folder).exitCode).toBe(0);
	const hosts = async (log: string, more: string) => {
		using free = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
		const { port } = free;
		free.stop(true);
		return await Promise.all(
			["0", "1"].map(async (index) => {
				const child = Bun.spawn([executable, ...flags(log, more)], {
					cwd: run.folder,
					env: {
						...process.env,
						NNODES: "2",
						NPROC_PER_NODE: "1",
						MASTER_ADDR: "127.0.0.1",
						MASTER_PORT: String(port),
						JOB_COMPLETION_INDEX: index,
					},
					stdout: "pipe",
					stderr: "pipe",
				});
				const [, stderr] = await Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text()]);
				return { exitCode: await child.exited, stderr };
			}),
		);
	};
	expect(await hosts("two.jsonl", "")).toEqual([
		{ exitCode: 0, stderr: "" },
		{ exitCode: 0, stderr: "" },
	]);
	const losses = (log: string) =>
		loggedSteps(run.path(log)).map((step) => [step.iteration, step["lm loss"], step.grad_norm]);
	expect(losses("two.jsonl")).toEqual(losses("one.jsonl"));
	expect(losses("two.jsonl")).toHaveLength(2);
	const failed = await hosts("text.txt/log.jsonl", "");
	expect(failed.map(({ exitCode }) => exitCode === 0)).toEqual([false, false]);
	expect(failed.map(({ stderr }) => stderr).join("")).toContain("text.txt/log.jsonl");
}, 120_000);
