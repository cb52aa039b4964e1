"""Episodes of several turns: tools, environments, and the loop that plays them."""

from pl_grouprl.episodes.mcp import MCPTools
