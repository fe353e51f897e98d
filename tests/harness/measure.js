(async () => {
  const found = {};
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    Object.assign(frame.style, {width: "WIDTHpx", height: "900px", border: 0});
    await new Promise((loaded) => { frame.onload = loaded; frame.src = page; document.body.append(frame); });
    await new Promise((later) => setTimeout(later, 300));
    found[page] = ((document, window) => { SCRIPT })(frame.contentDocument, frame.contentWindow);
    frame.remove();
  }
  document.getElementById("found").textContent = JSON.stringify(found);
})();
