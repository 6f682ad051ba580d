"""Whether what an endpoint of OpenAI's API generates has the distribution of its model."""
