/** The states that pickles may set on instances (opcode BUILD). */
import { NumpyArray, NumpyDtype, PythonObject, Tuple } from "./values.ts";

/** Sets the state of an instance. Throws a RangeError without a place for an instance or a state that is not allowed. */
export function setState(instance: unknown, state: unknown): void {
	if (instance instanceof PythonObject) {
		if (instance.state !== undefined) throw new RangeError(`it sets the state of a ${instance.type} twice`);
		instance.state = state;
	} else if (instance instanceof NumpyDtype) {
		const order = state instanceof Tuple ? state.items[1] : null;
		if (order !== "<" && order !== ">" && order !== "|" && order !== "=") {
			throw new RangeError("a numpy dtype has an impossible state");
		}
		instance.bigEndian = order === ">";
	} else if (instance instanceof NumpyArray) {
		setArray(instance, state);
	} else if (!(instance instanceof Map && state instanceof Map)) {
		// An OrderedDict's attributes are of no use here and dropped.
		throw new RangeError("it sets the state of what has none");
	}
}

/** `state` as numpy.ndarray.__setstate__ takes it: version, shape, dtype, whether columns are contiguous, bytes or objects. */
function setArray(array: NumpyArray, state: unknown): void {
	const [, shape, dtype, fortran, data] = state instanceof Tuple ? state.items : [];
	if (
		!(shape instanceof Tuple) ||
		!shape.items.every((size) => Number.isSafeInteger(size) && (size as number) >= 0) ||
		!(dtype instanceof NumpyDtype) ||
		!(data instanceof Uint8Array || Array.isArray(data))
	) {
		throw new RangeError("a numpy array has an impossible state");
	}
	array.shape = shape.items as number[];
	array.dtype = dtype;
	array.fortranOrder = fortran === true;
	array.data = data;
}
