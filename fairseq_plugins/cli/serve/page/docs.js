"use strict";
const make = (name, ...content) => { const element = document.createElement(name); element.append(...content); return element; };

(async () => {
  const api = await (await fetch("openapi.json")).json();
  const fields = ({ properties = {}, required = [] }) => make("ul", ...Object.entries(properties).map(([name, field]) =>
    make("li", make("code", name), required.includes(name) ? " (required): " : ": ", field.description)));
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const section = make("section", make("h2", make("code", `${method.toUpperCase()} ${path}`)), make("p", operation.summary));
      const body = Object.values(operation.requestBody?.content || {})[0]?.schema;
      if (body) section.append(make("h3", "Request"), fields(api.components.schemas[body.$ref.split("/").pop()]));
      for (const [status, { description }] of Object.entries(operation.responses)) section.append(make("p", `${status}: ${description}`));
      document.getElementById("paths").append(section);
    }
  }
})();
