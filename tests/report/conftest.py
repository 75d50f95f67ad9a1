"""The browser for tests of pages."""

from tests.report.webdriver import browser as browser
