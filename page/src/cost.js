// The cost of modules: multiplications with weights in one pass, counted from shapes.

/** Weights of a linear layer or a convolution; 0 for other modules. */
function weightsOf({ type, parameterCount, description }, width) {
  if (!/^(NonDynamicallyQuantizable)?Linear$|^Conv[123]d/.test(type)) return 0;
  return Number(parameterCount) - (/bias=False/.test(description) ? 0 : width);
}

function own(module) {
  let sum = 0;
  for (const { outputs: [output] } of module.calls) {
    const shape = output?.tensor?.shape.map(Number) ?? [];
    const channel = module.type.startsWith("Conv") ? 1 : shape.length - 1;
    const positions = shape.reduce((product, length, at) => (at === channel ? product : product * length), 1);
    if (shape.length) sum += weightsOf(module, shape[channel]) * positions;
  }
  return sum;
}

/** Multiplications of each module and all inside it, by path: those of linear layers and convolutions. */
export function costsOf(modules) {
  const costs = new Map();
  for (const module of modules) {
    const cost = own(module);
    const names = cost ? module.path.split(".") : [];
    for (let depth = 1; depth <= names.length; depth += 1) {
      const path = names.slice(0, depth).join(".");
      costs.set(path, (costs.get(path) ?? 0) + cost);
    }
  }
  return costs;
}
