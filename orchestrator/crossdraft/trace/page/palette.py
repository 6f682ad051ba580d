"""The colours of a timeline, for the picture and the page's light look; page.css has the dark one."""

FILLS = {
    "epoch0": "#8fb8e8",
    "epoch1": "#f0b878",
    "epoch2": "#7fcdc4",
    "epoch3": "#cba8e2",
    "epoch4": "#e3d079",
    "epoch5": "#e6a0b4",
    "late": "#d4d4d4",
    "wait": "#ffffff",
    "session": "#444444",
    "accepted": "#2f9e44",
    "corrected": "#d6336c",
    "bonus": "#1c7ed6",
}
HATCHES = {"late": "////", "miss": "....", "wait": "///"}
MARK_COLOURS = {"refused": "#d6336c", "hit": "#2b8a3e", "stalled": "#e8590c", "lost": "#c92a2a", "border": "#c8c8c8"}
INK = {"lane": "#f4f4f4", "label": "#111111", "edge": "#ffffff", "hatch": "#a0a0a0"}
