// Draws the server's own OpenAPI document, so that /docs needs nothing from elsewhere.

const at = (id) => document.getElementById(id);

function element(name, text = "", ...children) {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...children);
  return made;
}

function kindOf(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    const link = element("a", name);
    link.href = `#schema-${name}`;
    return link;
  }
  const either = schema.anyOf ?? schema.oneOf;
  if (either) {
    const kinds = either.flatMap((one, index) => (index ? [" or ", kindOf(one)] : [kindOf(one)]));
    return element("span", "", ...kinds);
  }
  if (schema.enum) return element("span", schema.enum.map((one) => JSON.stringify(one)).join(", "));
  if (schema.type === "array") return element("span", "list of ", kindOf(schema.items ?? {}));
  return element("span", schema.format ?? schema.type ?? "anything");
}

function table(titles, rows) {
  const head = element("tr", "", ...titles.map((title) => element("th", title)));
  const body = rows.map((cells) => element("tr", "", ...cells.map((cell) => element("td", "", cell))));
  return element("table", "", element("thead", "", head), element("tbody", "", ...body));
}

function operation(path, method, described) {
  const title = element("summary", "", element("b", `${method.toUpperCase()} ${path}`));
  title.append(element("span", ` ${described.summary ?? ""}`));
  const box = element("details", "", title);
  const bodies = Object.entries(described.requestBody?.content ?? {});
  if (bodies.length) {
    box.append(table(["Body", "Schema"], bodies.map(([type, one]) => [type, kindOf(one.schema ?? {})])));
  }
  const answers = Object.entries(described.responses ?? {}).map(([status, one]) => {
    const types = Object.entries(one.content ?? {});
    const kinds = types.flatMap(([type, content]) => [`${type}: `, kindOf(content.schema ?? {}), " "]);
    return [status, one.description ?? "", element("span", "", ...kinds)];
  });
  box.append(table(["Status", "Means", "Content"], answers));
  return box;
}

function schema(name, described) {
  const box = element("details", "", element("summary", "", element("b", name)));
  box.id = `schema-${name}`;
  const needed = new Set(described.required ?? []);
  const rows = Object.entries(described.properties ?? {}).map(([field, one]) => [
    element("code", field), kindOf(one), needed.has(field) ? "required" : "", one.description ?? "",
  ]);
  box.append(rows.length ? table(["Field", "Kind", "", "Meaning"], rows) : kindOf(described));
  return box;
}

function openNamed() {
  const named = at(location.hash.slice(1));
  if (named?.tagName === "DETAILS") named.open = true;
}

async function draw() {
  at("curl").textContent =
    `curl -F image=@examples/frame.png -F instruction='pick up the butter and place it in the basket' ${location.origin}/v1/act`;
  try {
    const response = await fetch("/openapi.json");
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const document = await response.json();
    for (const [path, methods] of Object.entries(document.paths)) {
      for (const [method, described] of Object.entries(methods)) {
        at("operations").append(operation(path, method, described));
      }
    }
    for (const [name, described] of Object.entries(document.components?.schemas ?? {})) {
      at("schemas").append(schema(name, described));
    }
    at("schemas-title").hidden = false;
    at("state").hidden = true;
    openNamed();
  } catch (error) {
    at("state").textContent = `openapi.json cannot be read: ${error.message}. Reload the page.`;
  }
}

addEventListener("hashchange", openNamed);
draw();
